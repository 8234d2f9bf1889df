"""The prefix cache by itself."""

from gla_ext.serve import Request
from gla_ext.serve.prefix import PrefixCache


class FakeRows:
    """Checkpoints of 10 bytes each."""

    class Copy:
        nbytes = 10

    def checkpoint_nbytes(self):
        return 10

    def checkpoint(self, row):
        return self.Copy()


def keys_of(cache, tokens):
    return cache.keys(Request(tokens).tokens)


def test_prefix_cache_finds_the_longest_and_stays_in_its_budget():
    cache = PrefixCache(FakeRows(), 64, 59)
    a = keys_of(cache, [1] * 129)
    assert len(a) == 2
    assert len(keys_of(cache, [1] * 128)) == 1  # a token is left to compute from
    for count in (64, 100, 128, 192):
        cache.put(a, count, row=0)
    assert (len(cache), cache.nbytes) == (2, 20)
    assert cache.find(a)[0] == 128
    assert cache.find(keys_of(cache, [1] * 100 + [2] * 100))[0] == 64
    assert cache.find(keys_of(cache, [2] + [1] * 200)) == (0, None)
    for n in range(2, 7):
        cache.find(a)
        cache.put(keys_of(cache, [n] * 65), 64, row=0)
    assert (len(cache), cache.nbytes, cache.evictions) == (5, 50, 2)
    assert cache.find(a)[0] == 128  # used between
    assert cache.find(keys_of(cache, [2] * 65))[0] == 0
    # Of a prompt longer than the budget, the beginnings that others may share, and the last.
    long = keys_of(cache, [9] * 64 * 20)
    for count in range(64, 64 * 20, 64):
        cache.put(long, count, row=0)
    assert [key in cache._kept for key in long] == [True] * 2 + [False] * 16 + [True]
    off = PrefixCache(FakeRows(), 64, 9)
    assert not off.enabled and keys_of(off, [1] * 200) == []
