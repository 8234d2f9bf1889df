"""What a step on a pool with buffers refuses."""

import pytest
import torch
from buffered import Buffered, raises


def test_shapes():
    x = Buffered("cpu", 3)
    with raises(ValueError, "state to have shape [P, H, V, K] = [7, 4, 28, 20], got "
                "[7, 4, 20, 28]"):  # fmt: skip
        x.step(state_v_first=True)
    for name, size, last in (("buffer_k", 20, "K"), ("buffer_g", 20, "K"), ("buffer_v", 28, "V")):
        t = x.pools[name]
        with raises(ValueError, f"{name} to have shape [P, L, HK, {last}] = [7, 16, 4, {size}], "
                    f"got [6, 16, 4, {size}]"):  # fmt: skip
            x.step(**{name: t[:6]})
    with raises(ValueError, "count to have shape [P] = [7], got [6]"):
        x.step(count=x.rows["count"][:6])
    few = {n: t[:, :2] for n, t in x.pools.items() if n != "state"}
    with raises(ValueError, "T to be from 1 to L = 2, the tokens of a buffer, got 3"):
        x.step(**few)
    with raises(ValueError, "T to be from 1 to L = 16, the tokens of a buffer, got 0"):
        x.step(**{n: t[:, :0] for n, t in x.tokens.items()})


def test_dtypes():
    x = Buffered("cpu", 1)
    for name in ("buffer_k", "buffer_v"):
        with raises(TypeError, f"{name} to be torch.float32 like q, got torch.bfloat16"):
            x.step(**{name: x.pools[name].bfloat16()})
    with raises(TypeError, "buffer_g to be torch.float32 like gk, got torch.bfloat16"):
        x.step(buffer_g=x.pools["buffer_g"].bfloat16())
    with raises(TypeError, "buffer_g to be torch.bfloat16, torch.float16 or torch.float32, got "
                "torch.float64"):  # fmt: skip
        x.step(buffer_g=x.pools["buffer_g"].double(), gk=None)
    with raises(TypeError, "count to be torch.int32 or torch.int64, got torch.float32"):
        x.step(count=x.rows["count"].float())
    with pytest.raises(TypeError, match="expected scale to be a number, got a tensor; multiply q"):
        x.step(scale=torch.tensor(0.5))


def test_strides_of_pools():
    x = Buffered("cpu", 1)
    for name, t in x.pools.items():
        what = f"the last two dimensions of {name} to be contiguous, got strides "
        wide = torch.cat([t, t], -1)[..., : t.shape[-1]]
        with raises(ValueError, what + str(list(wide.stride()))):
            x.step(**{name: wide})
        with raises(ValueError, f"the matrices of {name} to lie apart, got sizes {list(t.shape)} "
                    f"with strides {[0, *t.stride()[1:]]}"):  # fmt: skip
            x.step(**{name: t[:1].expand(t.shape)})


def test_devices():
    x = Buffered("cpu", 1)
    for name in ("buffer_k", "buffer_v", "buffer_g", "count"):
        with raises(ValueError, f"{name} on the device of q, cpu, got meta"):
            x.step(**{name: (x.pools | x.rows)[name].to("meta")})


def test_autocast():
    x = Buffered("cpu", 1)
    with torch.autocast("cpu", torch.bfloat16):
        short = {n: x.pools[n].bfloat16() for n in ("buffer_k", "buffer_v")}
        assert x.step(**short).dtype == torch.bfloat16
