# Sourced by the other scripts: virtual environments that are made once and again when their
# recipe changes.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# ensure_environment DIRECTORY PIP_ARGUMENT...
#
# Makes a virtual environment with what the arguments ask pip for. Does nothing where it was
# made from the same arguments, pyproject.toml and Python.
ensure_environment() {
    local directory=$1 python=${PYTHON:-python3} recipe
    shift
    recipe=$(
        {
            "$python" --version
            printf '%s\n' "$@"
            cat "$ROOT/pyproject.toml"
        } | sha256sum
    )
    if [[ -x $directory/bin/python && $(cat "$directory/recipe" 2>/dev/null) == "$recipe" ]]; then
        return
    fi
    echo "setting up ${directory#"$ROOT/"}" >&2
    if [[ $("$directory/bin/python" --version 2>/dev/null) == $("$python" --version) ]]; then
        "$python" -m venv "$directory"
    else
        "$python" -m venv --clear "$directory"
    fi
    "$directory/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2
    echo "$recipe" >"$directory/recipe"
}

# The environment that everything but the framework tests runs in.
ensure_main_environment() {
    ensure_environment "$ROOT/.venv" --editable "$ROOT[test,lint]"
}
