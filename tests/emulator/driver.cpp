// The driver's functions that torch looks up when CUDA starts. The library has the driver's name,
// so that nothing loads another one. Only the functions of the context are called; those that would
// launch a kernel without the runtime return an error.

// Without cuda.h, whose declarations differ by version in what does not matter here.
enum { kSuccess = 0, kNotSupported = 801 };

extern "C" {

int cuCtxGetCurrent(void** context) {
  static char mine;
  *context = &mine;
  return kSuccess;
}
int cuCtxSetCurrent(void*) { return kSuccess; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}
int cuDeviceGet(int* device, int number) {
  *device = number;
  return kSuccess;
}
int cuGetErrorString(int, const char** text) {
  *text = "the emulated GPU has no driver";
  return kSuccess;
}

#define GLA_NOT_THERE(name) \
  int name() { return kNotSupported; }
GLA_NOT_THERE(cuDeviceGetAttribute)
GLA_NOT_THERE(cuDevicePrimaryCtxRetain)
GLA_NOT_THERE(cuFuncGetAttribute)
GLA_NOT_THERE(cuFuncSetAttribute)
GLA_NOT_THERE(cuFuncSetCacheConfig)
GLA_NOT_THERE(cuLaunchCooperativeKernel)
GLA_NOT_THERE(cuLaunchKernel)
GLA_NOT_THERE(cuLinkAddData_v2)
GLA_NOT_THERE(cuLinkComplete)
GLA_NOT_THERE(cuLinkCreate_v2)
GLA_NOT_THERE(cuModuleGetFunction)
GLA_NOT_THERE(cuModuleLoad)
GLA_NOT_THERE(cuModuleLoadData)
GLA_NOT_THERE(cuModuleLoadDataEx)
GLA_NOT_THERE(cuModuleUnload)
GLA_NOT_THERE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
GLA_NOT_THERE(cuPointerGetAttribute)
GLA_NOT_THERE(cuTensorMapEncodeTiled)
#undef GLA_NOT_THERE

}  // extern "C"
