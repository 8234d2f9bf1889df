"""The prefix cache by itself."""

import pytest

from gla_ext.serve import Request
from gla_ext.serve.prefix import PrefixCache

ROWS = range(40, 45)


def keys_of(cache, tokens):
    return cache.keys(Request(tokens).tokens)


def reserve(cache, keys, start, stop):
    with cache.round():
        return cache.reserve(keys, start, stop, 64)


def test_prefix_cache_finds_the_longest_and_stays_in_its_rows():
    cache = PrefixCache(ROWS, 10, 64)
    a = keys_of(cache, [1] * 129)
    assert len(a) == 2
    assert len(keys_of(cache, [1] * 128)) == 1  # a token is left to compute from
    assert reserve(cache, a, 0, 192) == [40, 41, -1]
    assert reserve(cache, a, 0, 100) == [-1]  # it is there
    assert (len(cache), cache.nbytes) == (2, 20)
    assert cache.find(a) == (128, 41)
    assert cache.find(keys_of(cache, [1] * 100 + [2] * 100)) == (64, 40)
    assert cache.find(keys_of(cache, [2] + [1] * 200)) == (0, None)
    rows = []
    for n in range(2, 7):
        cache.find(a)
        rows += reserve(cache, keys_of(cache, [n] * 65), 0, 64)
    assert rows == [42, 43, 44, 42, 43]
    assert (len(cache), cache.nbytes, cache.evictions) == (5, 50, 2)
    assert cache.find(a) == (128, 41)  # used between
    assert cache.find(keys_of(cache, [2] * 65)) == (0, None)
    # Of a prompt longer than the budget, the beginnings that others may share, and the last.
    long = keys_of(cache, [9] * 64 * 20)
    reserve(cache, long, 0, 64 * 20)
    assert [key in cache._kept for key in long] == [True] * 2 + [False] * 16 + [True]
    assert set(cache._kept.values()) <= set(ROWS)
    assert len(set(cache._kept.values())) == len(cache) == 5
    off = PrefixCache(range(3, 3), 10, 64)
    assert not off.enabled and keys_of(off, [1] * 200) == []
    assert reserve(off, [], 0, 192) == []


def test_steps_of_pieces_may_be_shorter_than_those_of_checkpoints():
    cache = PrefixCache(ROWS, 10, 192)
    keys = keys_of(cache, [1] * 500)
    assert reserve(cache, keys, 64, 448) == [-1, 40, -1, -1, 41, -1]
    assert cache.find(keys) == (384, 41)


def test_a_round_reads_what_it_finds_and_shows_what_it_makes_after_it():
    cache = PrefixCache(range(2), 10, 64)
    a, b, c = (keys_of(cache, [n] * 65) for n in range(3))
    reserve(cache, a, 0, 64)
    with cache.round():
        assert cache.find(a) == (64, 0)
        assert cache.reserve(b, 0, 64, 64) == [1]
        assert cache.is_coming(b, 0) and not cache.is_coming(a, 0)
        assert cache.find(b) == (0, None)
        assert cache.reserve(b, 0, 64, 64) == [-1]  # one of them makes it
        assert cache.reserve(c, 0, 64, 64) == [-1]  # neither of the two rows is free now
    assert cache.find(b) == (64, 1)
    assert not cache.is_coming(b, 0)


def test_what_a_failed_round_would_have_made_is_not_there():
    cache = PrefixCache(range(1), 10, 64)
    a = keys_of(cache, [1] * 65)
    with pytest.raises(RuntimeError, match="failed"), cache.round():
        assert cache.reserve(a, 0, 64, 64) == [0]
        raise RuntimeError("failed")
    assert cache.find(a) == (0, None)
    assert reserve(cache, a, 0, 64) == [0]
