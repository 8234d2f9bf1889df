"""docs/environment.md has every environment variable that the code reads, and no other."""

import re

from source_tree import ROOT

FOLDERS = ["gla_ext", "csrc", "benchmarks", "tests", "examples", ".ci", "setup.py"]
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh", ""}
READ = re.compile(
    r"""(?:environ(?:\.get|\.setdefault|\.pop)?|getenv|\benv\.get|\benvironment)[(\[]\s*"([A-Z]\w+)"
      | "([A-Z]\w+)"\s+(?:not\s+)?in\s+os\.environ
      | \$\{([A-Z]\w+):-""",
    re.VERBOSE,
)
# Read by a name in a variable (setup.py's cuda_archs), by torch's build rules, by Triton, by torch.
ELSEWHERE = {"GLA_EXT_CUDA_ARCHS", "MAX_JOBS", "TRITON_CACHE_DIR"}
ELSEWHERE |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES"}
# Everybody's, no setting of gla_ext.
NO_SETTINGS = {"PATH"}
# vLLM's and Python's, which the tests in vLLM set.
NO_SETTINGS |= {"VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"}
NO_SETTINGS |= {"PYTHONSAFEPATH"}
# Of tests on several GPUs.
NO_SETTINGS |= {"PYTEST_XDIST_WORKER", "CUDA_VISIBLE_DEVICES"}


def read_in_the_code() -> set[str]:
    files = []
    for folder in FOLDERS:
        path = ROOT / folder
        files += [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    texts = [file.read_text() for file in files if file.suffix in SUFFIXES]
    return {name for text in texts for found in READ.findall(text) for name in found if name}


def test_the_page_has_the_variables_that_the_code_reads():
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert len(rows) == len(set(rows))
    found = read_in_the_code() - NO_SETTINGS
    assert len(found) > 15
    assert set(rows) == found | ELSEWHERE
