/* A library with NVML's ABI and two invented cards, so that the real bindings run on machines without a driver.
 *
 * NVML_STUB_MODE  no_driver: init fails    lost: card 1 is lost    bare: sensors are not supported
 * NVML_STUB_PID   a process that holds 3 GiB on card 0, where it also draws; process 2 draws with what is not told
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
#define GIB (1ULL << 30)

typedef struct { char legacy_id[16]; unsigned domain, bus, device, device_id, subsystem_id; char id[32]; } pci_info;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned gpu, memory; } rates_info;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_info;

static int cards[2] = {0, 1};
static int open_count = 0;

static int mode_is(const char *name) {
    const char *mode = getenv("NVML_STUB_MODE");
    return mode != NULL && strcmp(mode, name) == 0;
}

static int card_status(const int *card) { return *card == 1 && mode_is("lost") ? GPU_IS_LOST : OK; }

static int sensor_status(const int *card) { return mode_is("bare") ? NOT_SUPPORTED : card_status(card); }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (mode_is("no_driver")) return DRIVER_NOT_LOADED;
    open_count++;
    return OK;
}

int nvmlShutdown(void) {
    open_count--;
    return OK;
}

int stubOpenCount(void) { return open_count; }

const char *nvmlErrorString(int result) {
    switch (result) {
        case NOT_SUPPORTED: return "Not Supported";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case GPU_IS_LOST: return "GPU is lost";
        default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **card) {
    *card = &cards[index];
    return OK;
}

int nvmlDeviceGetPciInfo_v3(int *card, pci_info *info) {
    memset(info, 0, sizeof *info);
    info->domain = *card == 0 ? 0 : 0x1a2b;
    info->bus = *card == 0 ? 0x01 : 0xc1;
    snprintf(info->id, sizeof info->id, "%08X:%02X:00.0", info->domain, info->bus);
    return OK;
}

int nvmlDeviceGetMemoryInfo(int *card, memory_info *memory) {
    memory->total = (*card == 0 ? 24 : 12) * GIB;
    memory->used = (*card == 0 ? 5 : 1) * GIB;
    memory->free = memory->total - memory->used;
    return card_status(card);
}

int nvmlDeviceGetUtilizationRates(int *card, rates_info *rates) {
    rates->gpu = *card == 0 ? 87 : 0;
    rates->memory = 40;
    return sensor_status(card);
}

int nvmlDeviceGetTemperature(int *card, int sensor, unsigned *celsius) {
    (void)sensor;
    *celsius = 64;
    return sensor_status(card);
}

int nvmlDeviceGetPowerUsage(int *card, unsigned *milliwatts) {
    *milliwatts = 285500;
    return sensor_status(card);
}

/* A screen hangs on the first card, which has sixteen lanes of the fourth generation; the second has four of the third. */
int nvmlDeviceGetDisplayActive(int *card, unsigned *active) {
    *active = *card == 0;
    return sensor_status(card);
}

int nvmlDeviceGetMaxPcieLinkGeneration(int *card, unsigned *generation) {
    *generation = *card == 0 ? 4 : 3;
    return sensor_status(card);
}

int nvmlDeviceGetCurrPcieLinkWidth(int *card, unsigned *lanes) {
    *lanes = *card == 0 ? 16 : 4;
    return sensor_status(card);
}

int nvmlDeviceGetEnforcedPowerLimit(int *card, unsigned *milliwatts) {
    *milliwatts = 350000;
    return sensor_status(card);
}

int nvmlDeviceGetClockInfo(int *card, int clock, unsigned *mhz) {
    *mhz = clock == 1 ? 1695 : 9751;
    return sensor_status(card);
}

int nvmlDeviceGetCurrPcieLinkGeneration(int *card, unsigned *generation) {
    *generation = 1;
    return sensor_status(card);
}

/* The first card is at its power limit and too warm; the second one idles, which is the lowest bit. */
int nvmlDeviceGetCurrentClocksThrottleReasons(int *card, unsigned long long *reasons) {
    *reasons = *card == 0 ? 0x4 | 0x20 : 0x1;
    return sensor_status(card);
}

int nvmlDeviceGetComputeRunningProcesses_v3(int *card, unsigned *count, process_info *processes) {
    const char *pid = getenv("NVML_STUB_PID");
    if (*card != 0 || pid == NULL) {
        *count = 0;
        return OK;
    }
    unsigned room = *count;
    *count = 2;
    if (room < 2) return INSUFFICIENT_SIZE;
    memset(processes, 0, 2 * sizeof *processes);
    processes[0].pid = (unsigned)atoi(pid);
    processes[0].used = 3 * GIB;
    processes[1].pid = 1;
    processes[1].used = 1 * GIB;
    return OK;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(int *card, unsigned *count, process_info *processes) {
    int status = nvmlDeviceGetComputeRunningProcesses_v3(card, count, processes);
    if (status == OK && *count == 2) {
        processes[0].used = GIB / 2;
        processes[1].pid = 2;
        processes[1].used = ~0ULL;
    }
    return status;
}
