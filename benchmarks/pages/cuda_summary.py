"""The short table that `check_gpu.py` prints."""

from pages import cuda_page, decoding_page
from shared.timing import Timing


def report(results: dict) -> list[str]:
    """The short table."""
    lines = [f"{name}: {value}" for name, value in results["environment"].items()]
    if steps := results.get("steps"):
        lines += ["", "steps, ms: " + ", ".join(f"{n} {t.median:.3f}" for n, t in steps.items())]
        for x in results["kernels"]:
            lines.append(f"{x['us']:9.1f} us {x['launches']:3g} x {x['kernel'][:80]}")
    for mode, times in results.get("host_us", {}).items():
        lines.append(f"host, {mode}: " + ", ".join(f"{n} {t:.1f} us" for n, t in times.items()))
    if first := results.get("first_call_s"):
        lines.append("fresh process: " + ", ".join(f"{n} {t:.3f} s" for n, t in first.items()))
    lines += report_shapes(results)
    for shape, cases in results.get("gates", {}).items():
        for n, modes in cases.items():
            for mode, times in modes.items():
                timings = ", ".join(f"{who} {t}" for who, t in times.items())
                lines.append(f"gates {shape}, n {n}, {mode}, ms: {timings}")
    for part in ("others", "attention", "layer", "norm"):
        for name, row in results.get(part, {}).items():
            for mode, times in row.items():
                timings = ", ".join(f"{who} {t}" for who, t in times.items())
                lines.append(f"{part} {name}, {mode}, ms: {timings}")
    for name, row in results.get("training", {}).get("rows", {}).items():
        rate = cuda_page.tokens_per_s(row)
        lines.append(f"training, {name}: {rate:.0f} tokens/s, {row['peak_bytes'] / 2**30:.1f} GiB")
    return lines + decoding_page.report(results)


def report_shapes(results: dict) -> list[str]:
    modes = {"forward": "fwd", "forward + backward": "fwd+bwd"}
    heads = [f"{short} ms | steps | FLA | FLA/ours | ours/floor" for short in modes.values()]
    lines = ["", f"| B x T x H x K x V | {' | '.join(heads)} | peak MiB | FLA |"]
    rows = {name: row for name, row in results["shapes"].items() if row}
    for name, row in rows.items():
        cells = [name]
        for mode in modes:
            timings = row.get("speed", {}).get(mode, {})
            cells += speed_cells(timings, cuda_page.floor_ms(results, name, mode))
        memory = row.get("memory", {})
        cells += [f"{memory[x] / 2**20:.0f}" if x in memory else "" for x in ("gla_ext", "FLA")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines if rows else []


def speed_cells(timings: dict[str, Timing], floor: float) -> list[str]:
    if not timings:
        return [""] * 5
    ours, fla = timings["gla_ext"], timings.get("FLA")
    beside = [str(fla), f"{fla.median / ours.median:.2f}"] if fla else ["", ""]
    return [str(ours), str(timings["steps"]), *beside, f"{ours.median / floor:.1f}"]
