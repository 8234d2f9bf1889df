"""The sections of the page on decoding: generation, and the recurrent operators."""

from pages.tables import table
from parts import bench_generate, bench_recurrent


def generation(results: dict) -> list[str]:
    found = results.get("generate", {})
    return [*batches(found), *lengths(found)] if found else []


def batches(found: dict) -> list[str]:
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
        "Where it says compiled, the step is and the prompt is not.",
        "FLA runs eager on its own cache.",
        *found["notes"],
    ]
    lines = []
    for B in map(str, found["batches"]):
        lines += table(
            f"Generation, B {B}",
            "\n- ".join([f"{text}\n", *points]) if not lines else f"The same for {B} sequences.",
            ["first token, ms", "step, ms", "tokens/s"],
            {
                name: [
                    str(row["batches"][B]["first"]),
                    str(row["batches"][B]["step"]),
                    f"{tokens_per_s(row, B):.0f}",
                ]
                for name, row in found["rows"].items()
            },
        )
    return lines


def tokens_per_s(row: dict, B: str) -> float:
    return 1e3 * int(B) / row["batches"][B]["step"].median


def lengths(found: dict) -> list[str]:
    counts = [str(n) for n in found["lengths"]]
    return table(
        "Generation over length, B 1",
        f"After a prompt of {found['prompt']} and so many new tokens: a step, and the most that "
        "was allocated while decoding, weights included. gla_ext and FLA decoded all of these "
        f"tokens ({bench_generate.TRANSFORMER}: its cache has that length, filled with zeros). An "
        "empty cell was not measured.",
        [f"{what} {n}" for n in counts for what in ("step, ms, at", "peak, GiB, at")],
        {
            name: [cell for n in counts for cell in length_cells(row["lengths"].get(n))]
            for name, row in found["rows"].items()
        },
    )


def length_cells(row: dict | None) -> list[str]:
    return [str(row["step"]), f"{row['peak_bytes'] / 2**30:.3f}"] if row else ["", ""]


def recurrent(results: dict) -> list[str]:
    found = results.get("recurrent", {})
    if not found:
        return []
    lines = table(
        "Decoding's operators",
        "One token a row, bf16 tokens and gates, fp32 states unless said; µs in CUDA graphs, as "
        "the slope over many calls. The floor is `state.mul_(1)`. `step_` is "
        "`recurrent_gla_step_`, in place; `fused_recurrent` returns a new state. [V, K]: "
        "`state_v_first`.",
        heads := ["floor", *(f"{x} {y}" for x in ("step_", "fused_recurrent") for y in layouts())],
        {name: cells(row, heads) for name, row in found["step"].items()},
    )
    drafts = [f"T {T}" for T in bench_recurrent.DRAFTS]
    lines += table(
        "Verification of T drafted tokens",
        "`recurrent_gla_verify`; µs in CUDA graphs, as the slope over many calls.",
        drafts,
        {name: cells(row, drafts) for name, row in found["verify"].items()},
    )
    lines += table(
        "Host time of an eager call",
        f"At {bench_recurrent.name(bench_recurrent.SHAPES[0])}, without waiting for the GPU.",
        ["µs"],
        {f"`{name}`": [f"{us:.1f}"] for name, us in found["host"].items()},
    )
    return lines


def layouts() -> list[str]:
    return list(bench_recurrent.LAYOUTS)


def cells(row: dict, heads: list[str]) -> list[str]:
    return [str(row[head]) for head in heads]
