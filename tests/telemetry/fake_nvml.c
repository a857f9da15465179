/* A FAKE libnvidia-ml.so.1 for tests: it stands in for NVIDIA's NVML and measures nothing.
 *
 * It answers the few calls that mp_hydra makes through the real pynvml. The environment variable FAKE_NVML_MODE, read at
 * each call, chooses how it misbehaves; without it there is one GPU, with this process alone on it. Build it with
 *     gcc -shared -fPIC -o libnvidia-ml.so.1 fake_nvml.c
 * and put its directory on LD_LIBRARY_PATH.
 *
 * Memory of this process in the first, second, ... sample since the last init: 100, 300, 200, 200, ... MiB.
 * Energy counter: 5000 mJ at the first reading since the last init, 2500 more at each later one.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18
};

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} Process;

#define MIB (1024ULL * 1024ULL)
#define NO_INSTANCE 0xFFFFFFFFu

int fake_nvml_open = 0;    /* inits less shutdowns */
int fake_nvml_samples = 0; /* compute process lists asked for since the last init */
static int energy_readings = 0;
static int gpu;

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} Pci;

typedef struct {
    unsigned long long total, free, used;
} Memory;

static int mode(const char *name) {
    const char *chosen = getenv("FAKE_NVML_MODE");
    return chosen != NULL && strcmp(chosen, name) == 0;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    if (mode("driver_not_loaded")) return DRIVER_NOT_LOADED;
    if (mode("no_permission")) return NO_PERMISSION;
    if (mode("version_mismatch")) return LIB_RM_VERSION_MISMATCH;
    fake_nvml_open++;
    fake_nvml_samples = energy_readings = 0;
    return SUCCESS;
}

int nvmlShutdown(void) {
    fake_nvml_open--;
    return SUCCESS;
}

const char *nvmlErrorString(int result) {
    (void)result;
    return "an error of the fake NVML";
}

int nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    strncpy(version, "999.99-fake", length);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = 12060;
    return mode("bare") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = mode("no_gpus") ? 0 : 1;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
    (void)index;
    *device = &gpu;
    return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
    (void)device;
    strncpy(name, "Fake GPU", length);
    return mode("bare") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    (void)device;
    *memory = (Memory){24 * 1024 * MIB, 23 * 1024 * MIB, 1024 * MIB};
    return mode("bare") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    (void)device;
    *major = 8;
    *minor = 9;
    return mode("bare") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
    (void)device;
    strcpy(pci->busId, "00000000:65:00.0");
    return mode("bare") ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device) {
    if (strcmp(bus_id, "0000:65:00.0") != 0) return NOT_FOUND;
    *device = &gpu;
    return SUCCESS;
}

/* NVML's two calls: without room for the list it answers with the length that is needed. */
static int answer(const Process *list, unsigned int length, unsigned int *count, Process *out) {
    unsigned int room = *count;
    *count = length;
    if (length == 0) return SUCCESS;
    if (out == NULL || room < length) return INSUFFICIENT_SIZE;
    memcpy(out, list, length * sizeof(Process));
    return SUCCESS;
}

static Process own(void) {
    static const unsigned long long mib[] = {100, 300, 200};
    int sample = fake_nvml_samples < 3 ? fake_nvml_samples : 3;
    Process process = {(unsigned int)getpid(), mib[sample > 0 ? sample - 1 : 0] * MIB, NO_INSTANCE, NO_INSTANCE};
    if (mode("memory_not_told")) process.usedGpuMemory = (unsigned long long)-1;
    return process;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, Process *out) {
    Process list[2];
    unsigned int length = 1;
    (void)device;
    if (out == NULL) fake_nvml_samples++;
    if (mode("old_driver")) return FUNCTION_NOT_FOUND;
    if (mode("lists_forbidden")) return NO_PERMISSION;
    if (mode("timeout_once") && fake_nvml_samples == 2) return TIMEOUT;
    if (mode("lost") && fake_nvml_samples >= 2) return GPU_IS_LOST;
    if (mode("empty_list") || mode("graphics_only")) return answer(list, 0, count, out);
    list[0] = own();
    if (mode("host_pids")) list[0].pid = 999999;
    if (mode("others")) {
        list[1] = (Process){4242, 1000 * MIB, NO_INSTANCE, NO_INSTANCE};
        length = 2;
    }
    return answer(list, length, count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned int *count, Process *out) {
    Process list[1];
    (void)device;
    if (mode("cannot_draw")) return NOT_SUPPORTED;
    list[0] = own();
    return answer(list, mode("graphics_only") || mode("both_lists") ? 1 : 0, count, out);
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    (void)device;
    if (mode("no_energy_counter")) return NOT_SUPPORTED;
    *millijoules = 5000 + (mode("energy_stands_still") ? 0 : 2500ULL * energy_readings);
    energy_readings++;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *device, unsigned int *current, unsigned int *pending) {
    (void)device;
    if (mode("without_mig") || mode("bare")) return NOT_SUPPORTED;
    *current = *pending = mode("mig") ? 1 : 0;
    return SUCCESS;
}
