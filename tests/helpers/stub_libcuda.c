// A libcuda.so.1 without a GPU: as much of the driver as Triton calls to load and launch a kernel. What is loaded and
// launched goes to three functions of the test (stub_libcuda.py); the rest succeeds with a value that satisfies Triton.
#include <stdint.h>

static uint64_t (*loaded)(const void *image);
static uint64_t (*found)(uint64_t module, const char *name);
static void (*launched)(const void *config, uint64_t function, void **arguments);

void stub_report(void *to_load, void *to_find, void *to_launch) {
  loaded = (uint64_t(*)(const void *))to_load;
  found = (uint64_t(*)(uint64_t, const char *))to_find;
  launched = (void (*)(const void *, uint64_t, void **))to_launch;
}

enum { SUCCESS = 0, COMPUTE_CAPABILITY_MAJOR = 75, COMPUTE_CAPABILITY_MINOR = 76 };

int cuModuleLoadData(uint64_t *module, const void *image) { return *module = loaded(image), SUCCESS; }
int cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
  return *function = found(module, name), SUCCESS;
}
int cuLaunchKernelEx(const void *config, uint64_t function, void **arguments, void **extra) {
  return launched(config, function, arguments), SUCCESS;
}
int cuLaunchKernelEx_ptsz(const void *config, uint64_t function, void **arguments, void **extra) {
  return cuLaunchKernelEx(config, function, arguments, extra);
}

// Memory of the host stands for the device's.
int cuPointerGetAttribute(void *data, int attribute, uint64_t address) { return *(uint64_t *)data = address, SUCCESS; }
int cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t address) {
  for (unsigned i = 0; i < count; i++) *(uint64_t *)data[i] = address;
  return SUCCESS;
}

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == COMPUTE_CAPABILITY_MAJOR ? 9 : attribute == COMPUTE_CAPABILITY_MINOR ? 0 : 232448;
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(uint64_t *context, int device) { return *context = 1, SUCCESS; }
int cuCtxGetCurrent(uint64_t *context) { return *context = 1, SUCCESS; }
int cuCtxSetCurrent(uint64_t context) { return SUCCESS; }
int cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }
int cuCtxGetLimit(uint64_t *value, int limit) { return *value = 0, SUCCESS; }
int cuCtxSetLimit(int limit, uint64_t value) { return SUCCESS; }
int cuModuleUnload(uint64_t module) { return SUCCESS; }
int cuFuncGetAttribute(int *value, int attribute, uint64_t function) { return *value = attribute == 0 ? 1024 : 0, SUCCESS; }
int cuFuncSetAttribute(uint64_t function, int attribute, int value) { return SUCCESS; }
int cuFuncSetCacheConfig(uint64_t function, int config) { return SUCCESS; }
int cuOccupancyMaxActiveClusters(int *number, uint64_t function, const void *config) { return *number = 1, SUCCESS; }
int cuStreamIsCapturing(uint64_t stream, int *status) { return *status = 0, SUCCESS; }
int cuTensorMapEncodeTiled(void) { return SUCCESS; }
int cuTensorMapEncodeIm2col(void) { return SUCCESS; }
int cuGetErrorString(int error, const char **text) { return *text = "an error of the stub", SUCCESS; }
