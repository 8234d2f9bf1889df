"""The sections of the page on decoding: generation, and the recurrent operators."""

from pages.tables import table, under
from parts import bench_generate, bench_recurrent


def batches(results: dict) -> list[str]:
    found = results.get("generate")
    if not found:
        return []
    sizes = ", ".join(f"{name} {value}" for name, value in found["model"].items())
    parameters = ", ".join(f"{who} {n / 1e6:.0f} M" for who, n in found["parameters"].items())
    text = (
        f"Language models of one size ({sizes}; parameters: {parameters}) with random weights in "
        f"bf16, greedy, after prompts of {found['prompt']} tokens. Times are on the host's clock, "
        "with L2 as it is. Decoded logits were compared with those of a forward over all tokens "
        "before."
    )
    points = [
        "The first token: from the prompts on the device to it on the host.",
        "A step of gla_ext and of the Transformer is a CUDA graph. The Transformer's is made for "
        "the one length that it sees, which reads no cache beyond it and needs no mask. That is "
        "the best case, since a step of another length needs another graph.",
        "Fused projections: after `gla_ext.model.fuse_projections`.",
        "FLA runs eager on its own cache.",
        *found["notes"],
    ]
    lines = []
    for B in map(str, found["batches"]):
        rows = {}
        for name, row in found["rows"].items():
            first, step = (row["batches"][B][what] for what in ("first", "step"))
            rows[name] = [first, step, f"{1e3 * int(B) / step.median:.0f}"]
        lines += table(
            f"Generation, B {B}",
            "\n- ".join([f"{text}\n", *points]) if not lines else f"The same for {B} sequences.",
            ["first token, ms", "step, ms", "tokens/s"],
            rows,
        )
    return lines


def lengths(results: dict) -> list[str]:
    found = results.get("generate")
    if not found:
        return []
    rows: dict[str, list] = {}
    for name, row in found["rows"].items():
        rows[name] = []
        for n in found["lengths"]:
            x = row["lengths"].get(str(n))
            rows[name] += [x["step"], f"{x['peak_bytes'] / 2**30:.3f}"] if x else ["", ""]
    return table(
        "Generation over length, B 1",
        f"After a prompt of {found['prompt']} and so many new tokens: a step, and the most that "
        "was allocated while decoding, weights included. gla_ext and FLA decoded all of these "
        f"tokens ({bench_generate.TRANSFORMER}: its cache has that length, filled with zeros). An "
        "empty cell was not measured.",
        [f"{what} {n}" for n in found["lengths"] for what in ("step, ms, at", "peak, GiB, at")],
        rows,
    )


def recurrent(results: dict) -> list[str]:
    found = results.get("recurrent", {"step": {}, "verify": {}, "host": {}})
    layouts = list(bench_recurrent.LAYOUTS)
    heads = ["floor", *(f"{x} {y}" for x in ("step_", "fused_recurrent") for y in layouts)]
    drafts = [f"T {T}" for T in bench_recurrent.DRAFTS]
    return [
        *table(
            "Decoding's operators",
            "One token a row, bf16 tokens and gates, fp32 states unless said; µs in CUDA graphs, "
            "as the slope over many calls. The floor is `state.mul_(1)`. `step_` is "
            "`recurrent_gla_step_`, in place; `fused_recurrent` returns a new state. [V, K]: "
            "`state_v_first`.",
            heads,
            {name: under(heads, row) for name, row in found["step"].items()},
        ),
        *table(
            "Verification of T drafted tokens",
            "`recurrent_gla_verify`; µs in CUDA graphs, as the slope over many calls.",
            drafts,
            {name: under(drafts, row) for name, row in found["verify"].items()},
        ),
        *table(
            "Host time of an eager call",
            f"At {bench_recurrent.name(bench_recurrent.SHAPES[0])}, without waiting for the GPU.",
            ["µs"],
            {f"`{name}`": [f"{us:.1f}"] for name, us in found["host"].items()},
        ),
    ]
