"""The reader of pickles: what each opcode means, and what a hostile pickle may cost."""

import collections
import gc
import pickle
import pickletools
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conformance import BytesSource
from torch_bytes import Made, Symbol, pickled, torch_zip

from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.formats import pickles
from slimckpt.formats.collector import uncollected
from slimckpt.formats.pickles import (
    Call,
    Dict,
    Global,
    Persistent,
    PickleReader,
    Set,
    Stored,
    read_pickle,
)

OPCODES = {op.code.encode("latin-1"): op for op in pickletools.opcodes}


def read(data: bytes) -> Any:
    source = BytesSource(data)
    root, end = read_pickle(source, 0, len(data))
    assert end == len(data)
    return plain(root, data)


def plain(node: Any, data: bytes) -> Any:
    """A tree as Python would have it; calls as tuples that say what they are."""
    if type(node) is list:
        return [plain(item, data) for item in node]
    if type(node) is tuple:
        return tuple(plain(item, data) for item in node)
    if type(node) is Dict:
        return {plain(key, data): plain(value, data) for key, value in node.pairs}
    if type(node) is Set:
        return {plain(item, data) for item in node.items}
    if type(node) is Stored:
        body = data[node.offset : node.offset + node.nbytes]
        assert node.data in (None, body)
        return body.decode() if node.text else body
    if type(node) is Global:
        return ("global", node.module, node.name)
    if type(node) is Persistent:
        return ("persistent", plain(node.id, data))
    if type(node) is Call:
        parts = [plain(part, data) for part in (node.what, node.args, node.kwargs, node.state)]
        items = [plain(item, data) for item in node.items]
        pairs = [(plain(key, data), plain(value, data)) for key, value in node.pairs]
        return ("new" if node.new else "call", *parts, items, pairs)
    return node


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63, -(2**200), 10**300,
    0.5, -1e300, float("inf"), "", "a", "größe", "\n\\\u1234\U0001f600", "x" * 300, "y" * 70_000,
    (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1, [2, [3]]], {}, {"a": 1, (1, 2): [None]},
    [{"k": "v"}] * 3, list(range(3000)), {str(n): n for n in range(2500)},
]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_of_every_protocol_are_what_python_unpickles(protocol: int) -> None:
    for value in VALUES:
        if protocol or value != "y" * 70_000:
            assert read(pickle.dumps(value, protocol)) == value
    for value in (b"", b"a", b"x" * 300, {1, 2}, frozenset([3]), bytearray(b"q" * 9)):
        if protocol >= 4 and not isinstance(value, bytearray):
            assert read(pickle.dumps(value, protocol)) == value
    if protocol >= 3:
        assert read(pickle.dumps(b"x" * 300, protocol)) == b"x" * 300
    if protocol == 5:
        assert read(pickle.dumps(bytearray(b"q" * 9), protocol)) == b"q" * 9


@pytest.mark.parametrize("protocol", range(6))
def test_values_of_random_shape_are_what_python_unpickles(protocol: int) -> None:
    chance = random.Random(protocol)

    def value(depth: int) -> Any:
        kind = chance.randrange(9 if depth else 6)
        if kind < 6:
            return chance.choice(VALUES[:23])
        several = [value(depth - 1) for _ in range(chance.randrange(5))]
        if kind == 6:
            return several
        return tuple(several) if kind == 7 else {str(n): v for n, v in enumerate(several)}

    for _ in range(300):
        one = value(4)
        assert read(pickle.dumps([one, one], protocol)) == [one, one]


def test_shared_objects_are_one_object_and_cycles_are_cycles() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    for protocol in range(6):
        data = pickle.dumps((shared, shared), protocol)
        root, _ = read_pickle(BytesSource(data), 0, len(data))
        assert root[0] is root[1] and root[0][1] is root[0]


BEFORE = {
    "APPEND": b"]N", "APPENDS": b"](NN", "SETITEM": b"}NN", "SETITEMS": b"}(NNNN",
    "ADDITEMS": b"\x8f(NN", "REDUCE": b"N)", "BUILD": b"N)RN", "NEWOBJ": b"N)", "OBJ": b"(NN",
    "NEWOBJ_EX": b"N)}", "STACK_GLOBAL": b"X\1\0\0\0aX\1\0\0\0b", "DICT": b"(NN", "TUPLE": b"(NN",
    "LIST": b"(NN", "FROZENSET": b"(NN", "POP": b"N", "POP_MARK": b"(NN", "DUP": b"N",
    "TUPLE1": b"N", "TUPLE2": b"NN", "TUPLE3": b"NNN", "BINPERSID": b"N", "INST": b"(NN",
    "PUT": b"N", "BINPUT": b"N", "LONG_BINPUT": b"N", "MEMOIZE": b"N",
    "READONLY_BUFFER": b"\x97",
}  # fmt: skip
ARGUMENTS = {
    "INT": b"5\n", "LONG": b"5L\n", "STRING": b"'a'\n", "UNICODE": b"a\n", "FLOAT": b"1\n",
    "GET": b"0\n", "PUT": b"0\n", "PERSID": b"x\n", "GLOBAL": b"a\nb\n", "INST": b"a\nb\n",
    "LONG1": b"\1\5", "LONG4": b"\1\0\0\0\5", "BINBYTES": b"\1\0\0\0a", "SHORT_BINBYTES": b"\1a",
    "BINBYTES8": b"\1" + bytes(7) + b"a", "BYTEARRAY8": b"\1" + bytes(7) + b"a",
    "BINUNICODE8": b"\1" + bytes(7) + b"a", "SHORT_BINUNICODE": b"\1a", "PROTO": b"\4",
    "BINUNICODE": b"\1\0\0\0a", "BINSTRING": b"\1\0\0\0a", "SHORT_BINSTRING": b"\1a",
    "FRAME": b"\0" * 8, "EXT1": b"\1", "EXT2": b"\1\0", "EXT4": b"\1\0\0\0",
}  # fmt: skip


@pytest.mark.parametrize("name", [op.name for op in pickletools.opcodes if op.name != "STOP"])
def test_every_opcode_takes_from_the_stack_and_leaves_there_what_it_should(name: str) -> None:
    op = next(op for op in pickletools.opcodes if op.name == name)
    code = op.code.encode("latin-1")
    argument = ARGUMENTS.get(name, bytes(max(op.arg.n, 0)) if op.arg else b"")
    before = BEFORE.get(name, b"")
    # What is put into the memo is not said to be on the stack, but stays there.
    after = len(op.stack_after) + ("PUT" in name)
    if name == "MARK":
        code, after = b"(t", 1
    data = b"N0Nq\x000(" + before + code + argument + b"t."
    root, end = read_pickle(BytesSource(data), 0, len(data))
    assert end == len(data)
    assert len(root) == after, name


def test_there_are_the_opcodes_that_there_are() -> None:
    ours = {code for code, work in enumerate(pickles.OPCODES) if work is not None}
    assert ours == {ord(op.code) for op in pickletools.opcodes}


@pytest.mark.parametrize("protocol", range(2, 6))
def test_calls_are_nodes_and_nothing_is_called(protocol: int) -> None:
    class_, state = Symbol("os", "system"), {"a": 1}
    thing = Made(class_, ("rm -rf /",), state=state, items=[1, 2], pairs={"k": "v"})
    what = ("global", "os", "system")
    wanted = ("call", what, ("rm -rf /",), None, {"a": 1}, [1, 2], [("k", "v")])
    assert read(pickled(thing, protocol)[0]) == wanted
    thing = Made(class_, (1,), new=True)
    assert read(pickled(thing, protocol)[0]) == ("new", what, (1,), None, None, [], [])
    thing = Made(class_, (1,), new=True, kwargs={"k": 2})
    assert read(pickled(thing, protocol)[0]) == ("new", what, (1,), {"k": 2}, None, [], [])


def test_objects_of_protocol_0_and_1_are_calls_too() -> None:
    what = ("global", "os", "system")
    assert read(b"(I1\nI2\nios\nsystem\n.") == ("call", what, (1, 2), None, None, [], [])
    assert read(b"(cos\nsystem\nK\1K\2o.") == ("call", what, (1, 2), None, None, [], [])
    assert read(b"\x80\2\x82\7.") == ("global", "copyreg", "extension 7")
    assert read(b"Pa persistent id\n.") == ("persistent", "a persistent id")


def test_pickles_of_python_objects_are_trees() -> None:
    data = pickle.dumps(collections.OrderedDict(a=1), 2)
    assert read(data) == (
        "call",
        ("global", "collections", "OrderedDict"),
        (),
        None,
        None,
        [],
        [("a", 1)],
    )
    counter = read(pickle.dumps(collections.Counter("aab"), 4))
    assert counter[1] == ("global", "collections", "Counter") and counter[2] == ({"a": 2, "b": 1},)


def test_long_strings_are_places_and_are_not_read() -> None:
    body = bytes(range(256)) * 40_000
    for protocol in (3, 4, 5):
        data = pickle.dumps([body, "t", body + b"x"], protocol)
        source = BytesSource(data)
        root, _ = read_pickle(source, 0, len(data))
        first, _, other = root
        assert data[first.offset : first.offset + first.nbytes] == body
        assert data[other.offset : other.offset + other.nbytes] == body + b"x"
        assert source.nbytes_read < 300_000


def test_memo_indices_with_gaps_and_put_again_are_as_python_reads_them() -> None:
    data = b"(K\1q\7K\2q\0K\3q\0h\7h\0K\4r\0\1\0\0j\0\1\0\0t."
    assert read(data) == pickle.loads(data) == (1, 2, 3, 1, 3, 4, 4)
    mixed = b"\x80\4(K\1q\1K\2\x94h\1K\3p5\nh\5t."
    assert read(mixed) == (1, 2, 2, 3, 3) == pickle.loads(mixed)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x80\4K\1", "expected 1 more bytes, found 0; it was cut"),
        (b"\x80\4J\1\0", "it was cut"),
        (b"\x80\4B\5\0\0\0abc.", "a string of 5 bytes where 4 are left"),
        (b"\x80\4\x8e" + b"\xff" * 8, "a string of 18446744073709551615 bytes"),
        (b"\x80\4\x95" + b"\xff" * 8 + b"N.", "a frame of 18446744073709551615 bytes"),
        (b"\x80\6N.", "protocol 6, expected 0 to 5"),
        (b"\xffN.", "0xff is no opcode"),
        (b"NN.", "it ends with other than one object on its stack"),
        (b"(N.", "it ends with other than one object on its stack"),
        (b".", "it ends with other than one object on its stack"),
        (b"h\0.", "makes no sense (IndexError)"),
        (b"g-1\n.", "what it gets from its memo was never put there"),
        (b"Nq\5h\0.", "what it gets from its memo was never put there"),
        (b"Nr\xff\xff\xff\xff.", "puts into place 0xffffffff of a memo of 0"),
        (b"Np-1\n.", "puts into place -0x1 of a memo of 0"),
        (b"R.", "makes no sense (IndexError)"),
        (b"K\1Na.", "appends to a int"),
        (b"](Nu.", "a key without a value"),
        (b"](NNu.", "sets items of a list"),
        (b"](N\x90.", "adds to what is no set"),
        (b"]Nb.", "gives a state to a list"),
        (b"N\x86.", "a tuple of more than there is"),
        (b"NN\x93.", "the name of a global is no text"),
        (b"I" + b"9" * 2000 + b"\n.", "an integer of too many digits"),
        (b"\x8b\xff\xff\xff\x7f.", "an integer of 2147483647 bytes"),
        (b"Ix\n.", "invalid literal"),
        (b"Fx\n.", "could not convert"),
        (b"F" + b"1" * 2000 + b"\n.", "a number of too many digits"),
        (b"Sx\n.", "a string without quotes"),
        (b"T\xff\xff\xff\xff.", "a string of negative length"),
        (b"V" + b"x" * 70_000 + b"\n.", "a line is too long"),
        (b"X\1\0\0\0\xff.", "makes no sense (UnicodeDecodeError)"),
        (b"(o.", "not enough values"),
    ],
)  # fmt: skip
def test_a_pickle_that_breaks_a_rule_is_damaged_and_says_how(data: bytes, words: str) -> None:
    with pytest.raises(DamagedFileError) as caught:
        read_pickle(BytesSource(data), 0, len(data))
    assert words in str(caught.value)
    assert str(caught.value).startswith("it: the pickle at 0, byte ")


def test_opcodes_are_read_right_wherever_a_chunk_of_the_file_ends() -> None:
    body = pickle.dumps([2**20, "text", 2.5, (1, 2), 70000, b"x" * 300], 4)
    for shift in range(65_480, 65_560):
        data = b"\x80\4X" + struct.pack("<I", shift) + b"s" * shift + b"0" + body
        assert read(data) == [2**20, "text", 2.5, (1, 2), 70000, b"x" * 300]


def test_more_objects_than_the_reader_will_hold_are_not_understood() -> None:
    data = pickle.dumps([[n] for n in range(5000)], 4)
    with pytest.raises(NotUnderstoodError, match="more than 1000 objects; it is kept as a whole"):
        PickleReader(BytesSource(data), 0, len(data), 1000).read()
    assert len(PickleReader(BytesSource(data), 0, len(data), 20_000).read()) == 5000


def test_garbage_is_collected_again_after_the_last_reader_whatever_happens() -> None:
    assert gc.isenabled()
    with pytest.raises(DamagedFileError):
        read_pickle(BytesSource(b"\x80\4"), 0, 2)
    assert gc.isenabled()
    with uncollected(), uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        with uncollected():
            inside.set()
            done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    inside.wait()
    with uncollected():
        pass
    assert not gc.isenabled()
    done.set()
    thread.join()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def _nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    return b"\x80\4" + opening * depth + b"N" + closing * depth + b"."


TENSOR = pickled(
    Made(
        Symbol("torch._utils", "_rebuild_meta_tensor_no_storage"),
        (Symbol("torch", "float32"), (3,), (1,), False),
    ),
    4,
)[0][2 + 9 : -1]


def _laughs(levels: int, leaf: bytes) -> bytes:
    """A list that holds itself ten times over, as many levels deep."""
    steps = [b"]q\0(" + leaf * 10 + b"e"]
    for level in range(1, levels):
        steps.append(b"]q%c(" % level + b"h%c" % (level - 1) * 10 + b"e")
    return b"\x80\4" + TENSOR + b"q\xfa0(" + b"".join(steps) + b"l."


MEGABYTE = 1_000_000
BOMBS = {
    "marks": b"\x80\4" + b"(" * MEGABYTE,
    "empty dicts": b"\x80\4(" + b"}" * MEGABYTE + b"t.",
    "empty lists in a memo": b"\x80\4(" + b"]\x94" * (MEGABYTE // 2) + b"t.",
    "sets": b"\x80\4(" + b"\x8f" * MEGABYTE + b"t.",
    "buffers": b"\x80\4(" + b"\x97" * MEGABYTE + b"t.",
    "calls in calls": b"\x80\4N" + b")R" * (MEGABYTE // 2) + b".",
    "calls of calls": b"\x80\4N" + b"NR" * (MEGABYTE // 2) + b".",
    "persistent ids of persistent ids": b"\x80\4N" + b"Q" * MEGABYTE + b".",
    "tuples in tuples": _nested(MEGABYTE, b"", b"\x85"),
    "lists in lists": _nested(MEGABYTE // 3, b"](", b"e"),
    "dicts in dicts": _nested(MEGABYTE // 3, b"}N", b"s"),
    "states of states": b"\x80\4N)R" + b"N)Rb" * (MEGABYTE // 4) + b".",
    "duplicates": b"\x80\4(]" + b"2" * MEGABYTE + b"t.",
    "numbers": b"\x80\4(" + b"K\1" * (MEGABYTE // 2) + b"t.",
    "long numbers": b"\x80\4(" + (b"\x8b\0\0\1\0" + b"\x7f" * 65536) * 15 + b"t.",
    "numbers as text": b"\x80\4(" + (b"I" + b"9" * 1000 + b"\n") * 990 + b"t.",
    "text of one wide character": (
        b"\x80\4(" + (b"X\xff\xff\0\0" + b"a" * 65531 + "\U0001f600".encode()) * 15 + b"t."
    ),
    "holes in the memo": (
        b"\x80\4N" + b"".join(b"r" + struct.pack("<I", n << 16) for n in range(60_000)) + b"."
    ),
    "many laughs": _laughs(200, b"N"),
    "many laughs of a tensor": _laughs(200, b"h\xfa"),
    "many small pickles": b"\x80\4N." * (MEGABYTE // 4),
    "appends to a call": b"\x80\4N)R" + b"Na" * (MEGABYTE // 2) + b".",
    "items of a call": b"\x80\4N)R" + b"NNs" * (MEGABYTE // 3) + b".",
}  # fmt: skip


def _laughing_tensors() -> bytes:
    """A list of a tensor and many numbers, referred to again and again."""
    body = b"]\x94(" + TENSOR + b"K\1" * 300_000 + b"e"
    return b"\x80\4(" + body + b"](" + b"h\0" * 130_000 + b"el."


def _aliases() -> bytes:
    """One tensor under a long key, referred to half a million times."""
    key = b"X\0\xf0\0\0" + b"k" * 0xF000
    return b"\x80\4" + TENSOR + b"q\x640}" + key + b"](" + b"h\x64" * 460_000 + b"es."


def _deep_names() -> bytes:
    """A tensor at the end of 500 keys of 60,000 characters each, all one string."""
    key = b"X\x60\xea\0\0" + b"k" * 60_000 + b"q\x650"
    chain = b"}h\x65" * 500 + b"h\x64" + b"s" * 500
    return b"\x80\4" + TENSOR + b"q\x640" + key + chain + b"."


def _wrappers() -> bytes:
    """Wrapped tensors whose attributes are all the same wrapped tensor, and so on down."""
    steps = [
        b"\x80\4" + TENSOR + b"q\x640ctorch._tensor\n_rebuild_from_type_v2\nq\xc80"
        b"ctorch._utils\n_rebuild_wrapper_subclass\nq\xc90"
    ]
    for level in range(0x64, 0xA0):
        names = b"".join(b"X\1\0\0\0%ch%c" % (97 + n, level) for n in range(20))
        steps.append(b"h\xc8(h\xc9N)}(" + names + b"utRq%c0" % (level + 1))
    return b"".join(steps) + b"h\xa0."


def _many_tensors() -> bytes:
    """As many tensors as a megabyte holds, with 64 dimensions each."""
    shape = b"(" + b"K\1" * 64 + b"tq\x650(" + b"K\1" * 64 + b"tq\x660"
    made = b"ctorch._utils\n_rebuild_meta_tensor_no_storage\nq\x670(Nh\x65h\x66Ntq\x680"
    return b"\x80\4" + shape + made + b"](" + b"h\x67h\x68R" * 199_000 + b"e."


def _deflated(pickle_: bytes) -> bytes:
    return torch_zip({"a/data.pkl": pickle_, "a/version": b"3\n"}, ["a/data.pkl"])


INFLATED = 8 * 1024 * 1024
BOMBS |= {
    "deflated, of more than is decoded": _deflated(b"\x80\4(" + b"]" * 64 * MEGABYTE + b"t."),
    "deflated lists": _deflated(b"\x80\4(" + b"]" * (INFLATED - 8) + b"t."),
    "deflated, of no objects": _deflated(b"\x80\4N" + b"N0" * (INFLATED // 2 - 4) + b"."),
    "deflated text": _deflated(
        b"\x80\4(" + (b"X\xff\xff\0\0" + b"a" * 65531 + "\U0001f600".encode()) * 120 + b"t."
    ),
    "thousands of archives": torch_zip({"a/data.pkl": b"\x80\2N."}, alignment=1) * 4000,
    "thousands of members": torch_zip(
        {"a/data.pkl": b"\x80\2N."} | {f"a/data/{n}": b"" for n in range(10_000)}, alignment=1
    ),
    "a tensor beside many numbers, often": _laughing_tensors(),
    "one tensor under many long names": _aliases(),
    "one tensor under a long path": _deep_names(),
    "wrapped tensors all the way down": _wrappers(),
    "many tensors of many dimensions": _many_tensors(),
}
RUN = """
import re, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from conformance import BytesSource
from slimckpt.formats import examine
data = Path(sys.argv[3]).read_bytes()
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before, began = peak(), time.process_time()
found = examine(BytesSource(data))
print(time.process_time() - began)
print(1024 * (peak() - before))
print(found.condition, found.problem)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_megabyte_of_anything_takes_neither_five_seconds_nor_500_mb(
    name: str, tmp_path: Path
) -> None:
    assert len(BOMBS[name]) <= 1.05 * MEGABYTE
    (tmp_path / "bomb").write_bytes(BOMBS[name])
    here = Path(__file__).parent
    run = [sys.executable, "-c", RUN, here, here.parent, tmp_path / "bomb"]
    for _ in range(3):  # with another process on its core it takes twice the time
        told = subprocess.run(run, check=True, capture_output=True, text=True).stdout.splitlines()
        if float(told[0]) < 5:
            break
    assert float(told[0]) < 5, told
    assert int(told[1]) < 500_000_000, told
