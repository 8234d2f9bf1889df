"""How the linear maps of 17 to 32 decoded rows are spread over clusters: a pure function in C++."""

import os
import shutil
import subprocess

import pytest
from source_tree import ROOT
from torch.utils.cpp_extension import CUDA_HOME

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>

#include "cuda/decode_linear/cluster_plan.h"

using namespace gla_ext::cuda;

// D, tiles, what comes before, clusters at once of one block a multiprocessor and of two.
int main(int, char** arguments) {
  DecodeLinear p;
  p.D = p.group = std::atoi(arguments[1]);
  p.tiles = std::atoi(arguments[2]);
  const auto before = static_cast<Before>(std::atoi(arguments[3]));
  for (int i = 0; i < 2; ++i) p.clusters[i] = std::atoi(arguments[4 + i]);
  const decode::ClusterPlan plan = decode::plan_cluster(p, before);
  std::printf("%d %d\n", plan.tiles, decode::ClusterPlaces(p, plan, before).end);
}
"""
NOTHING, NORM, HEADS = range(3)
H200 = (30, 62)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Tiles of a cluster and bytes of a block."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or CUDA_HOME is None:
        pytest.skip("needs a C++ compiler and a CUDA toolkit's headers")
    program = tmp_path_factory.mktemp("plan") / "plan"
    include = [f"-I{ROOT / 'csrc'}", f"-I{CUDA_HOME}/include"]
    options = ["-std=c++17", "-x", "c++", "-", "-o", str(program)]
    subprocess.run([compiler, *include, *options], input=PROGRAM, text=True, check=True)

    def run(D, tiles, before, at_once):
        words = [str(x) for x in (D, tiles, before, *at_once)]
        found = subprocess.run([program, *words], capture_output=True, text=True, check=True)
        return tuple(map(int, found.stdout.split()))

    return run


def waves(tiles, each, block_bytes, at_once):
    clusters = -(-tiles // each)
    two = clusters > at_once[0] and block_bytes <= 113 << 10
    return -(-clusters // at_once[two])


@pytest.mark.parametrize(
    "D, tiles, before, at_once, expected",
    [
        (1024, 193, NORM, H200, 7),
        (1024, 64, HEADS, H200, 3),
        (1024, 352, NORM, H200, 12),
        (2816, 64, NOTHING, H200, 2),
        (1024, 352, NORM, (32, 66), 11),
        (1024, 352, NORM, (29, 62), 6),  # twelve tiles would make a second wave
    ],
)
def test_maps_of_width_1024_take_one_wave(plan, D, tiles, before, at_once, expected):
    each, block_bytes = plan(D, tiles, before, at_once)
    assert each == expected
    assert waves(tiles, each, block_bytes, at_once) == 1


@pytest.mark.parametrize(
    "D, tiles, before, expected",
    [(2048, 385, NORM, 2), (2048, 128, HEADS, 1), (2048, 704, NORM, 3), (5632, 128, NOTHING, 3)],
)
def test_wider_maps_take_few_waves(plan, D, tiles, before, expected):
    each, block_bytes = plan(D, tiles, before, H200)
    assert waves(tiles, each, block_bytes, H200) == expected


@pytest.mark.parametrize("at_once", [(0, 0), (1, 2), H200])
@pytest.mark.parametrize("before", [NOTHING, NORM, HEADS])
@pytest.mark.parametrize("D", [32, 416, 3136, 1 << 16])
def test_a_block_has_room_on_every_gpu(plan, D, before, at_once):
    each, block_bytes = plan(D, 5, before, at_once)
    assert each == 0 or block_bytes <= 220 << 10
    assert (each > 0) == (at_once != (0, 0) and D < 1 << 16)
