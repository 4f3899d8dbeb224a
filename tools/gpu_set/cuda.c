/* NVIDIA's driver library where there is no driver: what is linked against libcuda.so.1 loads, and every call says that there is
 * no device. A library that wants a function which is missing here does not load and names it: add it to the list. */

enum { INVALID_VALUE = 1, NO_DEVICE = 100 };

#define NONE(name) \
    int name(void) { return NO_DEVICE; }

NONE(cuCtxCreate_v2) NONE(cuCtxDestroy_v2) NONE(cuCtxGetCurrent) NONE(cuCtxGetDevice) NONE(cuCtxGetId) NONE(cuCtxGetLimit)
NONE(cuCtxPopCurrent_v2) NONE(cuCtxPushCurrent_v2) NONE(cuCtxSetCurrent) NONE(cuCtxSetLimit) NONE(cuDeviceGet) NONE(cuDeviceGetAttribute) NONE(cuDeviceGetName)
NONE(cuDevicePrimaryCtxGetState) NONE(cuDevicePrimaryCtxRelease_v2) NONE(cuDevicePrimaryCtxRetain) NONE(cuEventCreate)
NONE(cuEventDestroy_v2) NONE(cuEventRecord) NONE(cuEventSynchronize) NONE(cuFuncGetAttribute) NONE(cuFuncSetAttribute)
NONE(cuFuncSetCacheConfig) NONE(cuGetExportTable) NONE(cuInit) NONE(cuLaunchCooperativeKernel) NONE(cuLaunchKernel)
NONE(cuLaunchKernelEx) NONE(cuLinkAddData_v2) NONE(cuLinkComplete) NONE(cuLinkCreate_v2) NONE(cuMemAddressFree)
NONE(cuMemAddressReserve) NONE(cuMemAllocAsync) NONE(cuMemAllocPitch_v2) NONE(cuMemAlloc_v2) NONE(cuMemCreate)
NONE(cuMemFreeAsync) NONE(cuMemFree_v2) NONE(cuMemGetAllocationGranularity) NONE(cuMemMap) NONE(cuMemRelease)
NONE(cuMemSetAccess) NONE(cuMemUnmap) NONE(cuMemcpy2DAsync_v2) NONE(cuMemcpy2D_v2) NONE(cuMemcpyDtoH_v2) NONE(cuMemcpyHtoD_v2)
NONE(cuModuleGetFunction) NONE(cuModuleLoad) NONE(cuModuleLoadData) NONE(cuModuleLoadDataEx) NONE(cuModuleUnload)
NONE(cuOccupancyMaxActiveBlocksPerMultiprocessor) NONE(cuPointerGetAttribute) NONE(cuStreamCreate) NONE(cuStreamDestroy_v2)
NONE(cuStreamGetCtx) NONE(cuStreamSynchronize) NONE(cuStreamWaitEvent) NONE(cuTensorMapEncodeTiled)

int cuDeviceGetCount(int *count) {
    *count = 0;
    return NO_DEVICE;
}

int cuDriverGetVersion(int *version) { /* 580, the oldest driver for CUDA 13.0 */
    *version = 13000;
    return 0;
}

int cuGetErrorName(int error, const char **name) {
    (void)error;
    *name = "CUDA_ERROR_NO_DEVICE";
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    (void)error;
    *text = "no CUDA-capable device is detected";
    return 0;
}

/* The runtime asks for the driver's functions one by one; what has no address it takes as an older driver's. */
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    extern void *dlsym(void *, const char *);
    (void)version;
    (void)flags;
    *function = dlsym(0, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? 0 : INVALID_VALUE;
}
