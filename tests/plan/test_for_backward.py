"""Plans of what forward on CUDA keeps for backward."""

import pytest
from plans import BATCH, TIERS, full_plan, reads_prepared, sweeps_gradients


def alone_and_kept(change):
    """Plans of forward and of backward, each without and with what is kept."""
    return [
        [full_plan(**change, backward=backward, for_backward=kept) for kept in (False, True)]
        for backward in (False, True)
    ]


KEPT = {
    "segments": {"B": 1},
    "fp32 gates": {"gate_dtype": "float32"},
    "many keys": {"K": 256},
    "many keys, fp32 gates": {"K": 200, "gate_dtype": "float32"},
    "packed": {"B": 1, "T": 8192, "N": 8},
}


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_what_is_kept_is_made_once(change):
    """Both plans know its size, and need so much less of a workspace; neither changes otherwise."""
    both = []
    for backward, (alone, kept) in enumerate(alone_and_kept(change)):
        assert alone["for_backward_bytes"] == 0 and reads_prepared(kept)
        both.append(kept["for_backward_bytes"])
        least = 0.9 * kept["for_backward_bytes"]  # of parts that another pass does not make
        assert alone["workspace_bytes"] - kept["workspace_bytes"] >= least > 0
        changed = {name for name in alone if kept[name] != alone[name]}
        assert changed - {"kernels"} == {"for_backward_bytes", "workspace_bytes"}
        if backward:
            assert not {"prepare", "prepare.without_A", "states.cluster.summaries"} & {
                *kept["kernels"]
            }
        else:  # which may leave A besides
            assert kept["kernels"] == [x.removesuffix(".without_A") for x in alone["kernels"]]
    assert both[0] == both[1]


ON_CHIP = {
    "single blocks": {"V": 128},
    "single blocks, few keys and values": {"K": 104, "V": 104},
    "pairs of blocks": {},
    "pairs of blocks, one head each": {"B": 16},
    "pairs of blocks, few keys and values": {"K": 72, "V": 200},
}


@pytest.mark.parametrize("change", ON_CHIP.values(), ids=ON_CHIP)
def test_what_forward_keeps_from_the_chip(change):
    """It leaves operands that it has no other use for, backward then makes S alone."""
    (forward, kept_forward), (backward, kept_backward) = alone_and_kept(change)
    size = kept_forward["for_backward_bytes"]
    assert kept_backward["for_backward_bytes"] == size > 0
    assert 0 < forward["workspace_bytes"] - kept_forward["workspace_bytes"] < 0.1 * size
    assert backward["workspace_bytes"] - kept_backward["workspace_bytes"] == size
    for alone, kept in ((forward, kept_forward), (backward, kept_backward)):
        changed = {name for name in alone if kept[name] != alone[name]}
        more = {"items_each"} if "states.cluster" in alone["kernels"] else set()
        assert changed - more == {"kernels", "for_backward_bytes", "workspace_bytes"}
    assert ("states.cluster" in backward["kernels"]) == (change.get("V", 256) > 128)
    assert "states.cluster" not in kept_backward["kernels"] and sweeps_gradients(kept_backward)


PACKED = {"B": 1, "T": 65536, "N": 32}


@pytest.mark.parametrize("V, states", [(256, True), (128, False)])
def test_what_forward_keeps_of_packed_sequences(V, states):
    """Forward keeps the operands that it made on chip. If both passes cut sequences alike, it also
    keeps the states that enter segments. It keeps no decays, because it makes none for last
    segments.
    """
    (forward, kept_forward), (backward, kept_backward) = alone_and_kept(PACKED | {"V": V})
    size = kept_forward["for_backward_bytes"]
    assert kept_backward["for_backward_bytes"] == size > 0
    assert "states.cluster.packed_summaries" in forward["kernels"] and sweeps_gradients(backward)
    for alone, kept in ((forward, kept_forward), (backward, kept_backward)):
        changed = {name for name in alone if kept[name] != alone[name]}
        assert changed == {"kernels", "for_backward_bytes", "workspace_bytes"}
    count = 4 * 2 * ((1024 + 32 + 1) // forward["segment_chunks"])
    tiers = TIERS * 4 * (1024 + 32 + 1)
    less = forward["workspace_bytes"] - kept_forward["workspace_bytes"]
    assert 0 <= less - tiers - states * count * 128 * V * 4 < 1024  # rounding of parts
    assert backward["workspace_bytes"] - kept_backward["workspace_bytes"] == size


@pytest.mark.parametrize("change", (KEPT | ON_CHIP).values(), ids=KEPT | ON_CHIP)
def test_no_more_is_kept_than_the_inputs_have(change):
    sizes = BATCH | change
    each = 4 if change.get("gate_dtype") == "float32" else 2
    tokens = sizes["B"] * sizes["T"] * sizes["H"]
    inputs = tokens * (sizes["K"] * (4 + each) + 2 * sizes["V"])
    assert 0 < full_plan(**change, for_backward=True)["for_backward_bytes"] <= inputs


@pytest.mark.parametrize("K, each", [(128, 43136), (256, 77952)])
def test_what_is_kept_grows_with_tokens(K, each):
    """Operands and 8 bytes of tiers of each chunk and head."""
    sizes = [
        full_plan(K=K, B=1, T=T, for_backward=True)["for_backward_bytes"]
        for T in (64 * 64, 96 * 64)
    ]
    assert sizes[1] - sizes[0] >= 32 * 4 * (each + TIERS)
    if K == 256:  # the two passes do not cut alike
        assert sizes[1] - sizes[0] == 32 * 4 * (each + TIERS)


@pytest.mark.parametrize(
    "change",
    [
        {"B": 16, "T": 65},  # the second chunk is mostly padding
        {"B": 17},  # forward gates on its way, gradients need sums of which every bit is another's
        {"V": 192},
        {"B": 1, "K": 64},
        {"K": 256, "batch_invariant": True},  # whose forward has other references
        {"B": 1, "capability": "8.0"},
        {"B": 1, "dtype": "float32"},
        {"B": 1, "value_gated": True},
        {"B": 1, "aligned": False},
        {"T": 0},
        {"T": 0, "K": 256},
        {"B": 1, "T": 65536, "N": 4096},  # slots of short sequences are mostly padding,
        {"K": 136, "V": 64},  # and keys that are no multiple of 128 too: more than the inputs have
    ],
)
def test_where_nothing_is_kept(change):
    for alone, kept in alone_and_kept(change):
        assert alone == kept
