/* NVIDIA's management library, which claims eight H100 of 80 GB: what is asked through it (vLLM's platform, capabilities, memory)
 * makes the choices that it makes on such a node. Any other question is answered by "not supported". */

#include <stdio.h>
#include <string.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, DEVICES = 8 };

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned long long total, free, used; } Memory;

static const unsigned long long TOTAL = 80ull << 30;
static int handles[DEVICES];

static int index_of(void *device) { return (int)((int *)device - handles); }

static int say(char *to, unsigned length, const char *text) {
    snprintf(to, length, "%s", text);
    return OK;
}

int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int error) { return error == NOT_SUPPORTED ? "Not Supported" : "stand-in for NVML"; }

int nvmlDeviceGetCount_v2(unsigned *count) { *count = DEVICES; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= DEVICES) return INVALID_ARGUMENT;
    *device = &handles[index];
    return OK;
}

int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = (unsigned)index_of(device); return OK; }
int nvmlDeviceGetName(void *device, char *to, unsigned length) { (void)device; return say(to, length, "NVIDIA H100 80GB HBM3"); }
int nvmlSystemGetDriverVersion(char *to, unsigned length) { return say(to, length, "580.65.06"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }

int nvmlDeviceGetUUID(void *device, char *to, unsigned length) {
    char text[64];
    snprintf(text, sizeof text, "GPU-00000000-0000-0000-0000-00000000000%d", index_of(device));
    return say(to, length, text);
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    (void)device;
    *major = 9;
    *minor = 0;
    return OK;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    (void)device;
    *memory = (Memory){TOTAL, TOTAL, 0};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, Memory2 *memory) {
    (void)device;
    memory->total = memory->free = TOTAL;
    memory->reserved = memory->used = 0;
    return OK;
}

/* All cards see each other through NVLink. */
int nvmlDeviceGetP2PStatus(void *one, void *other, int what, int *status) {
    (void)one; (void)other; (void)what;
    *status = 0;
    return OK;
}
