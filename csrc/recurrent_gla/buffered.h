// recurrent_gla_buffered_step_, described in ops.h: its arguments and checks.
#pragma once

#include "common/shape.h"
#include "dispatch/arguments.h"
#include "ops.h"

namespace gla_ext {

struct BufferedStep {
  const at::Tensor &q, &k, &v;
  const OptionalTensor& gk;
  at::Tensor& state;
  const OptionalTensor& slots;
  at::Tensor &buffer_k, &buffer_v, &buffer_g;
  const at::Tensor& count;
  std::optional<double> scale;
  bool state_v_first;
};

Shape check_buffered_step(const BufferedStep& a);

// For backends, which write the state and the buffers in place.
void check_buffer_layouts(const BufferedStep& a);

}  // namespace gla_ext
