"""Law 5: the memory a run needs does not grow with the checkpoint or its largest tensor."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"
CHILD = """
import sys, threading, time
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify
from slimckpt.rewrite.restore import restore

peak, done = 0, False

def watch():
    global peak
    while not done:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]))
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
source, place = sys.argv[1:]
result = slim(source, place + "/store", jobs=4)
assert result.store_nbytes < 0.7 * result.source_nbytes
assert verify(place + "/store", against=source, jobs=4).safe
restore(place + "/store", place + "/back", jobs=4)
done = True
watcher.join()
print(peak * 1024)
"""


@pytest.mark.slow
def test_slimming_a_tensor_of_150_mb_takes_little_private_memory(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "place"
    options = ["--size", "320M", "--dp", "2", "--mp", "1", "--largest", "150M", "--no-optimizer"]
    subprocess.run([sys.executable, SCRIPT, source, *options], check=True)
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, source, place], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150_000_000
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
