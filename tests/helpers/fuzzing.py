"""Damaged files and JSON for hypothesis, and a limit of memory and time for what reads them."""

import contextlib
import copy
import json
import resource
import signal
from pathlib import Path

from hypothesis import strategies as st

SECONDS, BYTES = 20, 512 << 20

_BITS = (*(bytes([x]) for x in b'\xff\0["9- '), b'{"a":', b"\\ud800", b"1e999", b"NaN", b"\r\n")
_COUNTS = (1, 2, 3, 8, 64, 5_000, 200_000)
_EDIT = st.tuples(
    st.sampled_from(("insert", "replace", "delete", "repeat", "cut", "flip")),
    st.floats(0, 1),
    st.sampled_from(_BITS) | st.binary(min_size=1, max_size=8),
    st.sampled_from(_COUNTS),
)
_INTS = st.sampled_from((0, 1, -1, 2, 7, 300, 2**16, 2**31, 2**63, 2**64, 10**30, 10**400))
VALUES = st.recursive(
    st.none() | st.booleans() | _INTS | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


class HungError(BaseException):
    """It took too long. No Exception, so that nothing takes it for an error of its own."""


def as_bytes(value) -> bytes:
    """JSON as a file has it."""
    return json.dumps(value).encode()


@contextlib.contextmanager
def limited(nbytes: int = BYTES, seconds: int = SECONDS):
    """Inside, this process gets at most so much memory beyond what it has, and so much time."""

    def end(*_) -> None:
        raise HungError

    (data,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x[:6] == "VmData")
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_DATA, (int(data.split()[1]) * 1024 + nbytes, limits[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


@st.composite
def damaged(draw, data: bytes) -> bytes:
    """The bytes with some edits."""
    for kind, where, bits, count in draw(st.lists(_EDIT, min_size=1, max_size=4)):
        at = int(where * len(data))
        if kind == "insert":
            data = data[:at] + bits * count + data[at:]
        elif kind == "replace":
            data = data[:at] + bits + data[at + len(bits) :]
        elif kind == "delete":
            data = data[:at] + data[at + count :]
        elif kind == "repeat":
            data = data[: at + count] + data[at:]
        elif kind == "cut":
            data = data[:at]
        elif at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << count % 8]) + data[at + 1 :]
    return data


@st.composite
def edited(draw, value, values=VALUES):
    """The JSON value with some of its entries replaced, renamed or removed."""
    value = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            break
        inside, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(("replace", "replace", "remove", "rename")))
        if kind == "replace":
            inside[key] = draw(values)
        elif inside is not value:
            old = inside.pop(key)
            if kind == "rename" and isinstance(inside, dict):
                inside[draw(st.text(max_size=4))] = old
    return value[""]


def _places(value):
    """The lists and dicts in a value, each with each of its keys."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])


@contextlib.contextmanager
def refused(documented: tuple[type[Exception], ...]):
    """Inside, what reads damaged input may raise these errors, with a sentence, in time and with
    little memory.
    """
    with limited():
        try:
            yield
        except documented as error:
            assert str(error)
