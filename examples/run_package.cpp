// run_package PACKAGE CASES: runs an AOTInductor package on every case and compares.
// CASES, written by torch.save: a list of {"inputs": [...], "expected": [...], "bound": float}, the
// bound relative to the largest expected element. examples/aot_inductor.py writes both.
//
// A package names gla_ext's operators but refers to no symbol of the library that registers them:
// link it with -Wl,--no-as-needed, as CMakeLists.txt does for this program.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

namespace {

// A list from Python has no element type of its own.
std::vector<at::Tensor> tensors(const at::IValue& list) {
  std::vector<at::Tensor> result;
  for (const at::IValue& element : list.toListRef()) result.push_back(element.toTensor());
  return result;
}

bool close(const at::Tensor& actual, const at::Tensor& expected, double bound) {
  if (actual.sizes() != expected.sizes() || actual.dtype() != expected.dtype()) return false;
  if (expected.numel() == 0) return true;
  const double error = (actual - expected).abs().max().item<double>();
  const double size = expected.abs().max().item<double>();
  std::printf("error %.1e, largest element %.1e\n", error, size);
  return error <= bound * size;  // false for NaN
}

}  // namespace

// --8<-- [start:run]
int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: run_package PACKAGE CASES\n");
    return 2;
  }
  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const at::IValue list = torch::pickle_load(bytes);
  const at::ArrayRef<at::IValue> cases = list.toListRef();
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  int failures = 0;
  for (const at::IValue& entry : cases) {
    const auto values = entry.toGenericDict();
    const std::vector<at::Tensor> expected = tensors(values.at("expected"));
    const std::vector<at::Tensor> actual = package.run(tensors(values.at("inputs")));
    bool ok = actual.size() == expected.size();
    for (size_t i = 0; ok && i < expected.size(); ++i)
      ok = close(actual[i], expected[i], values.at("bound").toDouble());
    std::printf("%s\n", ok ? "ok" : "FAILED");
    failures += !ok;
  }
  return failures == 0 && !cases.empty() ? 0 : 1;
}
// --8<-- [end:run]
