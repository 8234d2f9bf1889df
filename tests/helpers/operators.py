"""Arguments of operators by name, for opcheck and for what each says of gradients and vmap."""

import torch
from common import make_inputs
from conv_pool import Pool
from pool_inputs import Prompts
from recurrence import Server, make_recurrence

ops = torch.ops.gla_ext
EPS = 1e-5


def overload(name: str):
    """The operator of `op`, `op.out` or, with what is special about a call, `op: what`."""
    name, _, variant = name.split(":")[0].partition(".")
    return getattr(getattr(ops, name), variant or "default")


def differentiable(device: str, packed: bool, dtype=torch.float32) -> dict[str, tuple]:
    """What has gradients: forward and backward of both forms."""
    more = {"lengths": (30, 0, 36) if packed else None, "states": packed, "device": device}
    flags = (None, packed, packed)  # scale, final state, v-first
    calls = {}
    kinds = {"keys": ("gk", 4), "none": ("none", 4), "values": ("gv", 4), "both": ("both", 2)}
    for what, (gating, HK) in kinds.items():
        x = make_recurrence(1 if packed else 2, 70, 4, 8, 12, gating=gating, dtype=dtype, **more)
        x = x.sharing(HK)
        inputs = (x.q, x.k, x.v, x.gk, x.gv)
        state, dht = (t if t is None else t.mT.contiguous() for t in (x.initial_state, x.dht))
        rest = (state, x.cu_seqlens)
        calls[f"chunk_gla_fwd: {what}"] = (*inputs, *rest, *flags, packed)
        calls[f"recurrent_gla_fwd: {what}"] = (*inputs, *rest, None, packed, not packed, packed)
        grads = (x.do, dht, *inputs, *rest, 0.3)
        calls[f"chunk_gla_bwd: {what}"] = (*grads, packed, False)
        calls[f"recurrent_gla_bwd: {what}"] = (*grads, False, packed)
    heads = (*(t[:, :, :4] for t in (x.q, x.k, x.v)), make_inputs(*x.k.shape, 1, dtype).g[..., 0])
    heads = (*heads[:3], heads[3].to(device), None, None, x.cu_seqlens, None)
    calls["chunk_gla_fwd: a head's"] = (*heads, True, False, False)
    calls["recurrent_gla_fwd: a head's"] = (*heads, True, False, False)
    return calls


def steps(device: str, packed: bool) -> dict[str, tuple]:
    """Every step's, each fed with what the steps before it returned."""
    lengths = (30, 0, 36) if packed else None
    B = 1 if packed else 2
    x = make_inputs(B, 70, 2, 8, 12, states=packed, lengths=lengths, device=device)
    cu, scale = x.cu_seqlens, 0.3 if packed else 8**-0.5
    h0, dht = x.initial_state, x.dht
    b = ops._gate_cumsum(x.g, cu)
    S, _ = ops._chunk_states(x.k, x.v, b, h0, cu, False)
    A = ops._scores_off_diagonal(x.q, x.k, b, cu, scale)
    A_diagonal = ops._scores_diagonal(x.q, x.k, b, cu, scale)
    dS, _ = ops._state_grads(x.q, x.do, b, dht, cu, scale, False)
    dA = ops._score_grads(x.do, x.v, cu, scale)
    intra = ops._intra_grads(x.q, x.k, b, dA, cu)
    return {
        "_gate_cumsum": (x.g, cu),
        "_chunk_states": (x.k, x.v, b, h0, cu, False),
        "_scores_off_diagonal": (x.q, x.k, b, cu, scale),
        "_scores_diagonal": (x.q, x.k, b, cu, scale),
        "_output": (x.q, x.v, b, A, A_diagonal, S, cu, scale),
        "_state_grads": (x.q, x.do, b, dht, cu, scale, False),
        "_value_grads": (x.k, x.do, b, A, A_diagonal, dS, cu),
        "_score_grads": (x.do, x.v, cu, scale),
        "_intra_grads": (x.q, x.k, b, dA, cu),
        "_merge_grads": (x.q, x.k, x.v, x.do, b, S, dS, *intra, cu, scale),
    }


def pools(device: str, packed: bool) -> dict[str, tuple]:
    """What works on a pool of states; a last argument that is a dict is of keywords."""
    prompts = Prompts(device, packed)
    asks, _ = prompts.checkpoints()
    call = (*prompts.tokens.values(), None, prompts.pool, *prompts.rows.values())
    call = (*call, prompts.options.get("cu_seqlens"), None, False, False)
    kept = (64, asks["checkpoints"], asks["checkpoint_slots"], asks.get("checkpoint_cu_starts"))
    out = {"out": torch.empty_like(prompts.tokens["v"])}

    server = Server(device, 3, state_v_first=packed)
    short = Server(device, 1, state_v_first=packed, state_dtype=torch.bfloat16)
    tokens, rest = tuple(server.tokens.values()), (server.pool, server.slots)
    one = (*short.tokens.values(), short.pool, short.slots, None, packed)
    count = torch.tensor([1] * 6, device=device)
    row = tuple(t.flatten(0, 1)[None] for t in tokens)
    offsets = torch.arange(0, 19, 3, device=device)
    draft = (*row, *rest, None, packed, offsets) if packed else (*tokens, *rest, 0.3, packed)
    writes = torch.tensor([1, 2, 3, 5, 0, -1], device=device)
    keys, values = ((7, 4, *t.shape[2:]) for t in tokens[1:3])
    buffers = [torch.zeros(size, device=device) for size in (keys, values, keys)]
    places = torch.tensor([0, 1, 2, 3, 4, 9, 2], device=device, dtype=torch.int32)
    ends = (*rest, count, packed, *((offsets, writes) if packed else ()))

    conv = Pool(device, packed=packed)
    rows = (conv.slots, conv.write_slots, prompts.rows["has_initial_state"][1:], conv.offsets)
    convolution = (conv.x, conv.weight, conv.bias, conv.pool, *rows)
    return {
        "chunk_gla_": call,
        "chunk_gla_: checkpoints": (*call, *kept),
        "chunk_gla_.out": (*call, *kept, out),
        "recurrent_gla_step_": (*tokens, *rest, None, packed),
        "recurrent_gla_step_: copy on write": (*one, writes),
        "recurrent_gla_step_: defaults": (
            *tokens[:3],
            None,
            None,
            server.pool[:6],
            None,
            None,
            packed,
        ),
        "recurrent_gla_step_.out": (*one, writes, {"out": torch.empty_like(short.tokens["v"])}),
        "recurrent_gla_buffered_step_": (*tokens[:4], *rest, *buffers, places, None, packed),
        "recurrent_gla_verify": draft,
        "recurrent_gla_verify.out": (*draft, {"out": torch.empty_like(draft[2])}),
        "recurrent_gla_commit_": (*(row if packed else tokens)[1:], *ends),
        "short_convolution_": convolution,
        "short_convolution_.out": (*convolution, {"out": torch.empty_like(conv.x)}),
    }


def decoding(device: str, dtype=torch.float32) -> dict[str, tuple]:
    """What makes a decoded token of a layer."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    x, r, o, g, a, b = (
        draw(*shape)
        for shape in ((2, 1, 64), (2, 1, 24), (2, 1, 2, 32), (2, 1, 64), (24, 64), (24, 64))
    )
    q, k, v, h, w, bias = (
        draw(*shape) for shape in (*[(2, 1, 2, 16)] * 3, (2, 1, 8), (32, 8), (32,))
    )
    slots = torch.tensor([2, 1], device=device)
    pool = draw(4, 2, 16, 16).float()
    return {
        "norm_linear": (x, None, EPS, [a, b]),
        "norm_swiglu": (x, None, EPS, a, b),
        "linear_residual": (x, a, r),
        "norm_gate_linear_residual": (o, draw(32), EPS, g, a, r),
        "recurrent_gla_low_rank_step_": (q, k, v, h, w, bias, 16.0, None, pool, slots, None, True),
    }


def fold_arguments(dtype=torch.float32) -> tuple:
    """Of two ranks, the second, whose two rows the first enters."""
    H, K, V, each = 2, 5, 3, 2
    own = each * H * (K * V + K + V)
    generator = torch.Generator().manual_seed(0)
    summaries = torch.randn(2 * own, generator=generator, dtype=dtype)
    boundary = torch.randn(each, H, V, K, generator=generator, dtype=dtype)
    sizes = (each, each, H, K, V)
    return summaries, None, boundary, 2, *sizes, True, True, True, [1], [1], []


def halves(dtype=torch.float32) -> dict[str, tuple]:
    """The halves of chunk_gla, on the CPU, and the fold between them."""
    x = make_recurrence(2, 70, 2, 5, 3, dtype=dtype)
    operands, state = (x.q, x.k, x.v, x.gk, x.gv), x.initial_state
    none = torch.empty(0, dtype=torch.uint8)
    entering = x.q.new_empty(2, 0, 2, 5, 3)
    grads = (x.do, x.dht, *operands)
    last = (0.3, False, False, none, entering, none)
    return {
        "chunk_gla_summary": (*operands, state, 0.3, False, False, True, 0),
        "chunk_gla_apply": (*operands, state, 0.3, True, False, False, True, none, 0),
        "chunk_gla_summary_bwd": (*grads, 0.3, False, False, none, 0),
        "chunk_gla_apply_bwd": (*grads, state, *last),
        "chunk_gla_fold": fold_arguments(dtype),
    }


def without_gradient(device: str = "cpu", packed: bool = False) -> dict[str, tuple]:
    """What refuses to lose a gradient."""
    return steps(device, packed) | pools(device, packed) | decoding(device) | halves()
