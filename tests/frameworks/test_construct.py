"""Objects of pickles, made by allowed constructors: those that pickle makes, and nothing runs."""

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import io
import os
import pathlib
import pickle
import struct
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slimckpt.errors import DamagedFileError, SlimckptError, UnknownGlobalError, UsageError
from slimckpt.formats.torch_files import _Bytes
from slimckpt.frameworks.allowed import Allowed
from slimckpt.frameworks.construct import Constructor


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Point:
    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return type(other) is Point and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


class Slotted:
    __slots__ = ("a", "b")


def made(data: bytes, allow: Any = (), mapped: bool = False, classes: Any = None) -> Any:
    """The object of a pickle; with ``mapped`` elements of arrays are not in what is read."""
    source = _Bytes(data, "file.pt")

    def memory(offset: int, nbytes: int) -> Any:
        return np.frombuffer(data[offset : offset + nbytes], np.uint8).copy()

    allowed = Allowed(classes=classes, allow=allow)
    return Constructor(
        source, 0, len(data), allowed=allowed, memory=memory if mapped else None
    ).read()


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (argparse.Namespace, types.SimpleNamespace)):
        return alike(vars(one), vars(other))
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype == object:
            return all(map(alike, one.ravel().tolist(), other.ravel().tolist()))
        in_order = one.strides == other.strides or not one.size
        return one.tobytes() == other.tobytes() and in_order
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return bool(one == other)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False), st.datetimes(), st.timedeltas(), st.dates(), st.uuids(),
    st.decimals(allow_nan=False), st.fractions(), st.sampled_from(Colour),
    st.just(datetime.timezone.utc), st.just(pathlib.PurePosixPath("a/b")), st.just(slice(1, 5, 2)),
    st.builds(bytearray, st.binary()), st.frozensets(st.integers()), st.sets(st.text()),
    hnp.arrays(
        st.one_of(
            hnp.scalar_dtypes(),
            # Fields of two names are refused, by name.
            hnp.array_dtypes().filter(lambda dtype: set(dtype.fields) == set(dtype.names)),
            hnp.byte_string_dtypes(),
            hnp.unicode_string_dtypes(),
        ),
        hnp.array_shapes(min_dims=0, min_side=0),
    ),
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(st.text(), inner),
        st.builds(collections.OrderedDict, st.dictionaries(st.text(), inner)),
        st.builds(collections.deque, st.lists(inner)),
        st.builds(lambda d: argparse.Namespace(**d), st.dictionaries(st.just("field"), inner)),
        st.builds(lambda d: types.SimpleNamespace(**d), st.dictionaries(st.just("field"), inner)),
    ),
    max_leaves=12,
)


@given(values, st.sampled_from([2, 3, 4, 5]), st.booleans())
def test_any_object_is_the_one_that_pickle_makes(value: Any, protocol: int, mapped: bool) -> None:
    data = pickle.dumps(value, protocol=protocol)
    found = made(data, [Colour], mapped)
    assert alike(found, pickle.loads(data))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("mapped", [False, True])
def test_arrays_of_every_kind_come_back_with_dtype_order_and_their_own_memory(
    protocol: int, mapped: bool
) -> None:
    arrays = [
        np.arange(600, dtype=np.float32),
        np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        np.arange(600, dtype=">i4").reshape(2, 300),
        np.zeros(0),
        np.array(3.5),
        np.array([1, "a", None, [2]], dtype=object),
        np.zeros(40, dtype=[("a", "<i4"), ("b", ">f8", (2,))][:1]),
        np.array(["x", "yz"]),
        np.arange(5) > 2,
        np.float64(0.1),
        np.int8(-3),
    ]
    data = pickle.dumps([*arrays, arrays[0]], protocol=protocol)
    found = made(data, mapped=mapped)
    assert alike(found, pickle.loads(data))
    assert found[0] is found[-1]
    found[0][0] = -1
    assert made(data, mapped=mapped)[0][0] == 0


def test_the_elements_of_large_arrays_are_asked_for_and_not_read() -> None:
    array = np.arange(1000.0)
    asked = []

    def memory(offset: int, nbytes: int) -> Any:
        asked.append(nbytes)
        return np.frombuffer(data[offset : offset + nbytes], np.uint8).copy()

    for protocol in (3, 4, 5):
        data = pickle.dumps({"a": array, "bytes": array.tobytes()}, protocol=protocol)
        source = _Bytes(data, "file.pt")
        found = Constructor(source, 0, len(data), allowed=Allowed(), memory=memory).read()
        np.testing.assert_array_equal(found["a"], array)
        assert found["bytes"] == array.tobytes()
    assert asked == [8000] * 3


def test_what_is_shared_or_holds_itself_is_and_does_so_here() -> None:
    inner = [1]
    value: dict[str, Any] = {"a": inner, "b": inner}
    value["self"] = value
    odd: list[Any] = []
    odd.append((odd,))
    point = Point(1)
    point.me = point  # type: ignore[attr-defined]
    for protocol in (2, 4):
        found = made(pickle.dumps([value, odd, point], protocol=protocol), [Point])
        assert found[0]["a"] is found[0]["b"] and found[0]["self"] is found[0]
        assert found[1][0][0] is found[1]
        assert found[2].me is found[2] and found[2].x == 1


def test_attributes_of_containers_slots_and_factories_come_back() -> None:
    ordered = collections.OrderedDict(a=1)
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]
    slotted = Slotted()
    slotted.a, slotted.b = 1, [2]
    counted = collections.Counter("aab")
    grouped = collections.defaultdict(list, x=[1])
    data = pickle.dumps([ordered, slotted, counted, grouped], protocol=4)
    found = made(data, [Slotted])
    assert found[0]._metadata == {"version": 1} and found[0] == ordered
    assert (found[1].a, found[1].b) == (1, [2])
    assert found[2] == counted and type(found[2]) is collections.Counter
    assert found[3] == grouped and found[3].default_factory is list


class Calls:
    """Pickles as a call of something."""

    def __init__(self, what: Any, *args: Any, state: Any = None) -> None:
        self.made = (what, args) if state is None else (what, args, state)

    def __reduce__(self) -> Any:
        return self.made


HOSTILE = {
    "a command": lambda p: Calls(os.system, f"touch {p}"),
    "eval": lambda p: Calls(eval, f"open({str(p)!r}, 'w')"),
    "exec": lambda p: Calls(exec, f"open({str(p)!r}, 'w')"),
    "open": lambda p: Calls(open, str(p), "w"),
    "a method of a path": lambda p: Calls(pathlib.Path.touch, p),
    "getattr of a module": lambda p: Calls(getattr, os, "system"),
    "getattr of a class": lambda p: Calls(getattr, pathlib.Path, "touch"),
    "an import": lambda p: Calls(__import__, "os"),
    "a subprocess": lambda p: Calls(__import__("subprocess").Popen, ["touch", str(p)]),
    "pickle again": lambda p: Calls(pickle.loads, pickle.dumps(Calls(os.mkdir, str(p)))),
    "a partial": lambda p: Calls(__import__("functools").partial, os.mkdir, str(p)),
    "map over calls": lambda p: Calls(list, Calls(map, os.mkdir, [str(p)])),
    "a default factory": lambda p: collections.defaultdict(os.getcwd),
    "numpy's load": lambda p: Calls(np.load, str(p)),
    "numpy's tofile": lambda p: Calls(np.ndarray.tofile, np.zeros(3), str(p)),
    "a temporary directory": lambda p: Calls(__import__("tempfile").mkdtemp, "", "", str(p.parent)),
    "a type": lambda p: Calls(type, "X", (), {}),
    "a code object": lambda p: Calls(types.FunctionType, 0, {}),
    "setattr": lambda p: Calls(setattr, os, "x", 1),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_runs(name: str, protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "ran"
    try:
        data = pickle.dumps(HOSTILE[name](target), protocol=protocol)
    except (pickle.PicklingError, TypeError, AttributeError):
        pytest.skip("pickle does not write this")
    with pytest.raises(SlimckptError):
        made(data)
    assert list(tmp_path.iterdir()) == []


G = b"cos\nsystem\n"
BY_HAND: dict[str, bytes] = {
    "INST": b"\x80\x02(S'x'\nios\nsystem\n.",
    "OBJ": b"\x80\x02(" + G + b"S'x'\no.",
    "NEWOBJ of a function": b"\x80\x02cbuiltins\ngetattr\n)\x81.",
    "NEWOBJ of a list": b"\x80\x02])\x81.",
    "REDUCE of a list": b"\x80\x02])R.",
    "REDUCE of an instance": b"\x80\x02ccollections\nCounter\n)R)R.",
    "BUILD on a class": b"\x80\x02ccollections\nCounter\n}X\x01\x00\x00\x00aK\x01sb.",
    "BUILD on a function": b"\x80\x02c_codecs\nencode\n}X\x01\x00\x00\x00aK\x01sb.",
    "BUILD on a list": b"\x80\x02]}b.",
    "BUILD on an int": b"\x80\x02K\x01}b.",
    "BUILD on an array without one": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)RK\x01b.",
    "an array never built": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R.",
    "SETITEM on a list": b"\x80\x02]K\x00K\x01s.",
    "APPEND to a dict": b"\x80\x02}K\x01a.",
    "ADDITEMS to a list": b"\x80\x04](K\x01\x90.",
    "an unhashable key": b"\x80\x02}]K\x01s.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02K\x01Q.",
    "a dotted name": b"\x80\x04\x8c\x08builtins\x8c\x0cdict.fromkeys\x93)R.",
    "a name through a module": b"\x80\x04\x8c\x08argparse\x8c\x0a_os.system\x93(\x8c\x01xtR.",
    "args that are no tuple": b"\x80\x02cbuiltins\nlist\n]R.",
    "dtype of an object": b"\x80\x02cnumpy\ndtype\n](K\x01e\x85R.",
    "out of band": b"\x80\x05\x97.",
    "bytes of a number": b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.",
    "a list of a range": b"\x80\x02cbuiltins\nlist\ncbuiltins\nrange\n\x8a\x05\x00\x00\x00\x00\x10"
    b"\x85R\x85R.",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_pickle_that_makes_no_sense_is_an_error(name: str) -> None:
    with pytest.raises(SlimckptError, match=r"file\.pt"):
        made(BY_HAND[name])


def test_the_dtypes_of_this_process_stay_what_they_are() -> None:
    # Without a copy asked for, numpy would hand out its own float32, and give it this state.
    state = b"(K\x03U\x01>NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb."
    head = b"\x80\x02cnumpy\ndtype\nU\x02f4K\x00K\x00\x87R"
    found = made(head + state)
    assert found == np.dtype(">f4")
    assert np.dtype("f4").isnative and np.dtype("f4") is not found
    double = b"cnumpy\ndtype\nU\x02f8K\x00K\x01\x87R"
    fields = b"(K\x03U\x01|N(U\x01at}U\x01a" + double + b"K\x20\x86sK\x04K\x01K\x00tb."
    with pytest.raises(SlimckptError, match="dtype"):
        made(b"\x80\x02cnumpy\ndtype\nU\x02V4K\x00K\x01\x87R" + fields)


def test_an_array_of_other_length_than_its_shape_says_is_damaged() -> None:
    data = pickle.dumps(np.arange(300.0), protocol=4)
    for wrong in (b"M\x2d\x01\x85", b"M\x2b\x01\x85"):
        changed = data.replace(b"M\x2c\x01\x85", wrong)
        assert changed != data
        for mapped in (False, True):
            with pytest.raises(DamagedFileError, match="bytes for an array"):
                made(changed, mapped=mapped)


def test_an_array_of_objects_that_holds_itself_is_refused_not_made_wrong() -> None:
    array = np.empty(1, object)
    array[0] = array
    with pytest.raises(SlimckptError):
        made(pickle.dumps(array, protocol=2))


def test_what_is_not_on_the_list_is_named_with_the_way_to_allow_it() -> None:
    data = pickle.dumps(Point(1), protocol=2)
    with pytest.raises(UnknownGlobalError, match=r"Point.*allow=\[Point\]"):
        made(data)
    assert made(data, [Point]) == Point(1)
    with pytest.raises(UsageError, match="classes and functions"):
        made(data, ["test_construct.Point"])


def test_a_member_of_an_enumeration_may_come_by_its_name() -> None:
    by_name = b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93\x8c\x0etest_construct\x8c\x06Colour\x93"
    assert made(by_name + b"\x8c\x03RED\x86R.", [Colour]) is Colour.RED
    with pytest.raises(SlimckptError, match="refused"):
        made(by_name + b"\x8c\x09__class__\x86R.", [Colour])


DEEP = b")" + b"\x85" * 100_000
TWICE = b")q\x00" + b"".join(b"0h%ch%c\x86q%c" % (n, n, n + 1) for n in range(50))
LISTS = b"]q\x00" + b"".join(b"0]q%c(h%ch%ce" % (n + 1, n, n) for n in range(50))
TOO_MUCH = {
    "a deep key": (b"}" + DEEP + b"K\x01s", "too deep"),
    "a deep item of a set": (b"\x8f(" + DEEP + b"\x90", "too deep"),
    "a deep item of a frozen set": (b"(" + DEEP + b"\x91", "too deep"),
    "what is counted is deep": (b"ccollections\nCounter\n" + DEEP + b"\x85\x85R", "too deep"),
    "slices in slices": (b"cbuiltins\nslice\n" * 10_000 + b"N" + b"\x85R" * 10_000, "too deep"),
    "a key by 2 ** 50 paths": (TWICE + b"0}h\x32K\x01s", "too often"),
    "the text of 2 ** 50 lists": (LISTS + b"0cbuiltins\nstr\nh\x32\x85R", "larger"),
    "a long fraction": (b"cfractions\nFraction\nX\x09\x00\x00\x001e9999999\x85R", "larger"),
    "a long integer": (
        b"cbuiltins\nint\ncdecimal\nDecimal\nX\x09\x00\x00\x001e9999999\x85R\x85R",
        "larger",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_would_take_the_stack_or_the_time_of_python_is_refused(name: str) -> None:
    content, why = TOO_MUCH[name]
    with pytest.raises(DamagedFileError, match=why):
        made(b"\x80\x04" + content + b".")


def test_lists_and_dicts_may_lie_deep_in_each_other() -> None:
    found, depth = made(b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."), 0
    while found:
        (found,), depth = found, depth + 1
    assert depth == 4999


@pytest.mark.parametrize("protocol", [0, 1, 2, 5])
def test_objects_of_a_class_may_be_made_where_it_may_not_be_called(protocol: int) -> None:
    classes = {__name__: ["Point"]}
    assert made(pickle.dumps(Point(3), protocol), classes=classes) == Point(3)
    created = pickle.dumps(Calls(Point, 3), protocol)
    with pytest.raises(UnknownGlobalError, match=r"calls .*\.Point,.*allow=\[Point\]"):
        made(created, classes=classes)
    assert made(created, [Point], classes=classes) == Point(3)


def test_members_of_enumerations_keep_what_they_are() -> None:
    with pytest.raises(DamagedFileError, match="gives a state to a Colour"):
        made(pickle.dumps(Calls(Colour, 1, state={"_value_": 2, "more": 3})), [Colour])
    assert Colour.RED.value == 1 and not hasattr(Colour.RED, "more")


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_constants_of_python_come_back_and_their_types(protocol: int) -> None:
    constants = [..., NotImplemented, None]
    state = [*constants, *map(type, constants)]
    assert all(map(lambda a, b: a is b, made(pickle.dumps(state, protocol)), state))


def test_an_error_of_a_constructor_names_it() -> None:
    with pytest.raises(SlimckptError, match=r"uuid\.UUID refused"):
        made(pickle.dumps(Calls(uuid.UUID, "no uuid"), protocol=2))


@given(st.data())
def test_a_changed_pickle_is_made_or_refused_and_nothing_else(data: st.DataObject) -> None:
    value = {
        "a": np.arange(200.0),
        "b": [decimal.Decimal(1), fractions.Fraction(1, 3), {1, 2}],
        "c": collections.OrderedDict(x=datetime.date(2026, 1, 2)),
    }
    protocol = data.draw(st.sampled_from([2, 4, 5]))
    content = bytearray(pickle.dumps(value, protocol=protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    try:
        made(bytes(content), mapped=data.draw(st.booleans()))
    except SlimckptError as error:
        assert "file.pt" in str(error)


def test_pickles_follow_each_other() -> None:
    stream = io.BytesIO()
    for value in (1, [2], {"three": 3}):
        pickle.dump(value, stream, protocol=4)
    data = stream.getvalue()
    reader = Constructor(_Bytes(data, "f"), 0, len(data), allowed=Allowed())
    assert [reader.read() for _ in range(3)] == [1, [2], {"three": 3}]


def test_modules_are_imported_only_where_a_name_on_the_list_needs_them() -> None:
    before = set(sys.modules)
    maker: Callable[[bytes], Any] = made
    with pytest.raises(UnknownGlobalError):
        maker(b"\x80\x02cantigravity\nfly\n.")
    assert "antigravity" not in set(sys.modules) - before
