/* Graphics cards that only count: the CUDA runtime, driver, cuBLAS and NVML calls of ggml-cuda and of our telemetry.
 *
 * The engine's real host code runs on this library. Memory is counted for each process and card in a ledger, a file
 * that all processes map; requests beyond the size of a card are refused as a driver refuses them. Copies are carried
 * out. Kernels do nothing, so answers have no meaning. The library is found under four names (see `cards.py`).
 *
 * STAND_IN_CARDS    "NAME=COMPUTE_CAPABILITY=MIB, ...": the cards, in the order of their PCI buses
 * STAND_IN_LEDGER   the file of the ledger; without it a process counts for itself
 * STAND_IN_CONTEXT  MiB that the context of a process takes on each card that it uses
 * STAND_IN_EMPTY    if set, copies to a card are dropped, and what is read back is zero: for models of any size
 * STAND_IN_EXPERTS  with STAND_IN_EMPTY: 32-bit words that are read back count from 0 to this number less 1, so that
 *                   they are valid numbers of experts, which ggml checks
 * STAND_IN_LEGACY   if set, the cards have no virtual memory, so that ggml's pools are made of whole buffers
 * STAND_IN_BROKEN   "1,3": numbers of cards on which no context can be made
 * STAND_IN_SLICED   "1,3": numbers of cards of which CUDA sees a slice (MIG), with a UUID of its own
 * STAND_IN_NO_NVML  if set, NVML does not begin
 *
 * Assumptions that a real card must confirm: memory is taken in blocks of 2 MiB, requests below 1 MiB share blocks,
 * and a context is made by the first call that needs a device (with CUDA 12 and later also by cudaSetDevice).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda.h"
#include "driver_types.h"

#define MIB (1LL << 20)
#define BLOCK_BYTES (2 * MIB)
#define SHARED_BELOW_BYTES MIB
#define SHARED_STEP_BYTES 512
#define MAX_CARDS 16
#define MAX_PROCESSES 4096
#define READY 0x1ed9e4u

typedef struct {
    int64_t used_bytes, peak_bytes;       /* in blocks of the card, the context included */
    int64_t buffer_bytes, buffer_peak_bytes; /* asked for by cudaMalloc */
    int64_t pool_bytes, pool_peak_bytes;  /* cuMemCreate, by which ggml's pools grow */
    int64_t small_bytes;                  /* requests that share blocks */
    int64_t context_bytes;
    int64_t refused;                      /* number of requests */
    char context_call[40];                /* the call that made the context; empty: the card is not used */
} account;

typedef struct {
    int32_t pid, is_over;
    int64_t started; /* ticks since boot: process ids are used again */
    int64_t pinned_bytes, pinned_peak_bytes;
    account cards[MAX_CARDS];
} process;

typedef struct {
    uint32_t ready, n_processes;
    pthread_mutex_t lock;
    process processes[MAX_PROCESSES];
} ledger;

typedef struct {
    char name[64];
    int major, minor;
    int64_t total_bytes;
} card;

static card all_cards[MAX_CARDS];
static int n_all;
static int seen[MAX_CARDS]; /* device number of this process -> card */
static int n_seen;
static ledger *book;
static process *mine;
static int64_t context_bytes;
static int is_empty, is_legacy, n_experts;
static unsigned broken, sliced; /* a bit for each card */
static int order[MAX_CARDS];    /* CUDA's numbers before any card is hidden -> card */
static __thread int current;
static __thread cudaError_t sticky;

/* ---- the cards, and which of them CUDA_VISIBLE_DEVICES leaves ---- */

static void read_cards(void) {
    const char *text = getenv("STAND_IN_CARDS");
    char *copy = strdup(text ? text : ""), *rest = copy, *item;
    while (n_all < MAX_CARDS && (item = strsep(&rest, ",")) != NULL) {
        card found;
        long long mib;
        memset(&found, 0, sizeof found);
        if (sscanf(item, " %63[^=]=%d.%d=%lld", found.name, &found.major, &found.minor, &mib) != 4) continue;
        found.total_bytes = mib * MIB;
        all_cards[n_all++] = found;
    }
    free(copy);
}

static void write_uuid(int index, char *uuid, size_t size) {
    snprintf(uuid, size, "GPU-%08x-0000-0000-0000-000000000000", index + 1);
}

/* Fill `order`: by PCI bus, or the newest first, as CUDA_DEVICE_ORDER says. */
static void order_cards(void) {
    const char *wanted = getenv("CUDA_DEVICE_ORDER");
    int by_bus = wanted != NULL && strcmp(wanted, "PCI_BUS_ID") == 0;
    for (int i = 0; i < n_all; i++) {
        int at = i, speed = all_cards[i].major * 10 + all_cards[i].minor;
        for (; !by_bus && at > 0; at--) {
            const card *before = &all_cards[order[at - 1]];
            if (before->major * 10 + before->minor >= speed) break;
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
}

static int card_named(const char *name) {
    for (int i = 0; i < n_all; i++) {
        char uuid[64];
        write_uuid(i, uuid, sizeof uuid);
        if (strncmp(name, "GPU-", 4) == 0 && strncmp(uuid, name, strlen(name)) == 0) return i;
    }
    char *end;
    long index = strtol(name, &end, 10);
    return end != name && index >= 0 && index < n_all ? order[index] : -1;
}

static void choose_visible(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible == NULL) {
        for (; n_seen < n_all; n_seen++) seen[n_seen] = order[n_seen];
        return;
    }
    char *copy = strdup(visible), *rest = copy, *item;
    while (n_seen < MAX_CARDS && (item = strsep(&rest, ",")) != NULL) {
        int index = card_named(item);
        if (index < 0) break; /* the driver ignores all that follows a bad entry */
        seen[n_seen++] = index;
    }
    free(copy);
}

/* ---- the ledger ---- */

/* Return the start time of a process, -1 if it is gone or a zombie. */
static int64_t start_of(int pid) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    if (length <= 0) return -1;
    text[length] = 0;
    char *field = strrchr(text, ')'), state;
    long long started = -1;
    /* Fields 3 to 22; the name in field 2 may contain anything. */
    if (field == NULL || sscanf(field + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %lld",
                                &state, &started) != 2)
        return -1;
    return state == 'Z' || state == 'X' ? -1 : started;
}

static void lock(void) {
    if (pthread_mutex_lock(&book->lock) == EOWNERDEAD) pthread_mutex_consistent(&book->lock);
}

static void unlock(void) { pthread_mutex_unlock(&book->lock); }

static ledger *map_ledger(void) {
    const char *path = getenv("STAND_IN_LEDGER");
    int file = -1, is_first = 1;
    if (path != NULL) {
        file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        is_first = file >= 0;
        if (!is_first) file = open(path, O_RDWR | O_CLOEXEC);
        if (file < 0) abort();
        if (is_first && ftruncate(file, sizeof(ledger)) != 0) abort();
        struct stat state;
        while (fstat(file, &state) == 0 && state.st_size < (off_t)sizeof(ledger)) usleep(1000);
    }
    int flags = MAP_SHARED | (file < 0 ? MAP_ANONYMOUS : 0);
    ledger *found = mmap(NULL, sizeof(ledger), PROT_READ | PROT_WRITE, flags, file, 0);
    if (found == MAP_FAILED) abort();
    if (file >= 0) close(file);
    if (is_first) {
        pthread_mutexattr_t shared;
        pthread_mutexattr_init(&shared);
        pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST); /* a child may be killed while it holds the lock */
        pthread_mutex_init(&found->lock, &shared);
        __atomic_store_n(&found->ready, READY, __ATOMIC_RELEASE);
    }
    while (__atomic_load_n(&found->ready, __ATOMIC_ACQUIRE) != READY) usleep(1000);
    return found;
}

/* Return a bit for each number in the variable. */
static unsigned numbers_in(const char *variable) {
    unsigned found = 0;
    char *copy = strdup(getenv(variable) ? getenv(variable) : ""), *rest = copy, *item;
    while ((item = strsep(&rest, ",")) != NULL)
        if (*item) found |= 1u << (unsigned)atoi(item);
    free(copy);
    return found;
}

__attribute__((constructor)) static void begin(void) {
    const char *text;
    read_cards();
    order_cards();
    choose_visible();
    if ((text = getenv("STAND_IN_CONTEXT")) != NULL) context_bytes = atoll(text) * MIB;
    if ((text = getenv("STAND_IN_EXPERTS")) != NULL) n_experts = atoi(text);
    is_empty = getenv("STAND_IN_EMPTY") != NULL;
    is_legacy = getenv("STAND_IN_LEGACY") != NULL;
    broken = numbers_in("STAND_IN_BROKEN");
    sliced = numbers_in("STAND_IN_SLICED");
    book = map_ledger();
    lock();
    if (book->n_processes == MAX_PROCESSES) abort();
    mine = &book->processes[book->n_processes++];
    mine->pid = getpid();
    mine->started = start_of(mine->pid);
    unlock();
}

__attribute__((destructor)) static void end(void) { mine->is_over = 1; }

static int lives(process *each) {
    if (!each->is_over && each != mine && start_of(each->pid) != each->started) each->is_over = 1;
    return !each->is_over;
}

/* Return the bytes that live processes hold of a card. The ledger is locked. */
static int64_t held_bytes(int index) {
    int64_t sum = 0;
    for (uint32_t i = 0; i < book->n_processes; i++) {
        process *each = &book->processes[i];
        if (each->cards[index].used_bytes && lives(each)) sum += each->cards[index].used_bytes;
    }
    return sum;
}

static int64_t in_blocks(int64_t bytes) { return (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES; }

static int64_t raised(int64_t *peak, int64_t value) { return *peak = value > *peak ? value : *peak; }

/* Take whole blocks of a card; return 0 if the card has no room. The ledger is locked. */
static int take(int index, int64_t blocks_bytes) {
    account *own = &mine->cards[index];
    if (blocks_bytes && held_bytes(index) + blocks_bytes > all_cards[index].total_bytes) {
        own->refused++;
        return 0;
    }
    own->used_bytes += blocks_bytes;
    raised(&own->peak_bytes, own->used_bytes);
    return 1;
}

/* ---- errors and contexts ---- */

static cudaError_t done(cudaError_t error) {
    if (error != cudaSuccess) sticky = error;
    return error;
}

static cudaError_t use_card(int device, const char *call) {
    if (device < 0 || device >= n_seen) return done(n_seen ? cudaErrorInvalidDevice : cudaErrorNoDevice);
    account *own = &mine->cards[seen[device]];
    cudaError_t error = cudaSuccess;
    if (own->context_call[0]) return error;
    if (broken & 1u << (unsigned)seen[device]) return done(cudaErrorDevicesUnavailable);
    lock();
    if (!own->context_call[0]) {
        if (take(seen[device], in_blocks(context_bytes))) {
            own->context_bytes = context_bytes;
            snprintf(own->context_call, sizeof own->context_call, "%s", call);
        } else {
            error = cudaErrorMemoryAllocation;
        }
    }
    unlock();
    return done(error);
}

/* The first line of each call that needs a context on the current device. */
#define NEEDS_CONTEXT                                             \
    do {                                                          \
        cudaError_t fault = use_card(current, __func__);          \
        if (fault != cudaSuccess) return fault;                   \
    } while (0)

/* ---- memory ---- */

typedef struct region {
    struct region *next;
    char *at;
    int64_t bytes;
    int index; /* the card; -1: pinned host memory */
} region;

static region *regions;
static pthread_mutex_t regions_lock = PTHREAD_MUTEX_INITIALIZER;

/* Shared and not private pages: memory of a card does not count as data of the process (RLIMIT_DATA). */
static void *map_bytes(int64_t bytes) {
    void *at = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

static void *new_region(int64_t bytes, int index) {
    region *added = malloc(sizeof *added);
    *added = (region){regions, map_bytes(bytes), bytes, index};
    pthread_mutex_lock(&regions_lock);
    added->next = regions;
    regions = added;
    pthread_mutex_unlock(&regions_lock);
    return added->at;
}

/* Unmap the region at `at`; return its size, -1 if there is none, and its card. */
static int64_t end_region(void *at, int *index) {
    int64_t bytes = -1;
    pthread_mutex_lock(&regions_lock);
    for (region **link = &regions; *link != NULL; link = &(*link)->next) {
        region *found = *link;
        if (found->at != at) continue;
        *link = found->next;
        bytes = found->bytes;
        *index = found->index;
        munmap(found->at, bytes ? bytes : 1);
        free(found);
        break;
    }
    pthread_mutex_unlock(&regions_lock);
    return bytes;
}

static int64_t in_steps(int64_t bytes) { return (bytes + SHARED_STEP_BYTES - 1) / SHARED_STEP_BYTES * SHARED_STEP_BYTES; }

/* Return the blocks that `bytes` more, or less, need on a card, and count them as shared if they are. */
static int64_t blocks_for(account *own, int64_t bytes, int sign) {
    if (bytes >= SHARED_BELOW_BYTES) return in_blocks(bytes);
    int64_t before = in_blocks(own->small_bytes);
    own->small_bytes += sign * in_steps(bytes);
    int64_t after = in_blocks(own->small_bytes);
    return sign * (after - before);
}

cudaError_t cudaMalloc(void **out, size_t size) {
    NEEDS_CONTEXT;
    *out = NULL;
    if (size == 0) return cudaSuccess;
    account *own = &mine->cards[seen[current]];
    lock();
    int64_t blocks = blocks_for(own, (int64_t)size, 1);
    int has_room = take(seen[current], blocks);
    if (has_room) raised(&own->buffer_peak_bytes, own->buffer_bytes += (int64_t)size);
    else if ((int64_t)size < SHARED_BELOW_BYTES) own->small_bytes -= in_steps((int64_t)size);
    unlock();
    if (has_room) *out = new_region((int64_t)size, seen[current]);
    return *out != NULL ? cudaSuccess : done(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags) {
    (void)flags;
    return cudaMalloc(out, size);
}

cudaError_t cudaFree(void *at) {
    NEEDS_CONTEXT;
    int index;
    if (at == NULL) return cudaSuccess;
    int64_t bytes = end_region(at, &index);
    if (bytes < 0 || index < 0) return done(cudaErrorInvalidValue);
    lock();
    mine->cards[index].used_bytes -= blocks_for(&mine->cards[index], bytes, -1);
    mine->cards[index].buffer_bytes -= bytes;
    unlock();
    return cudaSuccess;
}

static cudaError_t pin(void **out, size_t size) {
    *out = new_region((int64_t)size, -1);
    if (*out == NULL) return done(cudaErrorMemoryAllocation);
    lock();
    raised(&mine->pinned_peak_bytes, mine->pinned_bytes += (int64_t)size);
    unlock();
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t size) {
    NEEDS_CONTEXT;
    return pin(out, size);
}

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags) {
    (void)flags;
    NEEDS_CONTEXT;
    return pin(out, size);
}

cudaError_t cudaFreeHost(void *at) {
    NEEDS_CONTEXT;
    int index;
    int64_t bytes = at == NULL ? 0 : end_region(at, &index);
    if (bytes < 0) return done(cudaErrorInvalidValue);
    lock();
    mine->pinned_bytes -= bytes;
    unlock();
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **out, void *host, unsigned flags) {
    (void)flags;
    *out = host;
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *at, size_t size, unsigned flags) {
    (void)at, (void)size, (void)flags;
    NEEDS_CONTEXT;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *at) {
    (void)at;
    return cudaSuccess;
}

static void memory_of(int index, int64_t *free_bytes, int64_t *total_bytes) {
    lock();
    int64_t held = held_bytes(index);
    unlock();
    *total_bytes = all_cards[index].total_bytes;
    *free_bytes = held < *total_bytes ? *total_bytes - held : 0;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    NEEDS_CONTEXT;
    int64_t free_, total;
    memory_of(seen[current], &free_, &total);
    *free_bytes = (size_t)free_, *total_bytes = (size_t)total;
    return cudaSuccess;
}

/* ---- ggml's pools: address ranges that grow by cuMemCreate and cuMemMap ---- */

typedef struct mapping {
    struct mapping *next;
    uintptr_t at;
    int64_t bytes;
    int index;
} mapping;

typedef struct {
    int64_t bytes;
    int index;
} allocation;

static mapping *mappings;

CUresult cuDeviceGet(CUdevice *out, int number) {
    *out = number;
    return number >= 0 && number < n_seen ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = n_seen;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    snprintf(text, (size_t)length, "0000:%02X:00.0", seen[device] + 1);
    return CUDA_SUCCESS;
}

/* The macros of cuda.h give these two names the ending of their second versions. */
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[3] = (char)(seen[device] + 1);
    uuid->bytes[15] = (char)(sliced >> (unsigned)seen[device] & 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    *bytes = (size_t)all_cards[seen[device]].total_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED && !is_legacy;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the stand-in";
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(
    size_t *out, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option) {
    (void)properties, (void)option;
    *out = BLOCK_BYTES;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(
    CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties, unsigned long long flags) {
    (void)flags;
    int device = properties->location.id;
    if (device < 0 || device >= n_seen) return CUDA_ERROR_INVALID_DEVICE;
    account *own = &mine->cards[seen[device]];
    lock();
    int has_room = take(seen[device], in_blocks((int64_t)size));
    if (has_room) raised(&own->pool_peak_bytes, own->pool_bytes += (int64_t)size);
    unlock();
    if (!has_room) return CUDA_ERROR_OUT_OF_MEMORY;
    allocation *made = malloc(sizeof *made);
    *made = (allocation){(int64_t)size, seen[device]};
    *out = (uintptr_t)made;
    return CUDA_SUCCESS;
}

/* The engine releases a handle right after it has mapped it; the memory lives until it is unmapped. */
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    free((void *)(uintptr_t)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(
    CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    (void)offset, (void)flags;
    mapping *added = malloc(sizeof *added);
    pthread_mutex_lock(&regions_lock);
    *added = (mapping){mappings, at, (int64_t)size, ((allocation *)(uintptr_t)handle)->index};
    mappings = added;
    pthread_mutex_unlock(&regions_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
    pthread_mutex_lock(&regions_lock);
    for (mapping **link = &mappings; *link != NULL;) {
        mapping *found = *link;
        if (found->at < at || found->at + (uintptr_t)found->bytes > at + size) {
            link = &found->next;
            continue;
        }
        lock();
        mine->cards[found->index].used_bytes -= in_blocks(found->bytes);
        mine->cards[found->index].pool_bytes -= found->bytes;
        unlock();
        *link = found->next;
        free(found);
    }
    pthread_mutex_unlock(&regions_lock);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    (void)alignment, (void)at, (void)flags;
    void *range = map_bytes((int64_t)size);
    *out = (uintptr_t)range;
    return range != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
    munmap((void *)(uintptr_t)at, size);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count) {
    (void)at, (void)size, (void)access, (void)count;
    return CUDA_SUCCESS;
}

/* ---- copies ---- */

static void copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    if (!is_empty || kind == cudaMemcpyHostToHost) memmove(to, from, size);
    else if (kind == cudaMemcpyDeviceToHost)
        for (size_t i = 0; i < size / 4; i++) ((int32_t *)to)[i] = n_experts ? (int32_t)(i % (size_t)n_experts) : 0;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)stream;
    NEEDS_CONTEXT;
    copy(to, from, size, kind);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)stream;
    NEEDS_CONTEXT;
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(
    void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream) {
    (void)stream;
    cudaError_t error = use_card(to_device, __func__);
    if (error == cudaSuccess) error = use_card(from_device, __func__);
    if (error == cudaSuccess) copy(to, from, size, cudaMemcpyDeviceToDevice);
    return error;
}

cudaError_t cudaMemset(void *at, int value, size_t size) {
    NEEDS_CONTEXT;
    if (!is_empty) memset(at, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
    (void)stream;
    return cudaMemset(at, value, size);
}

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = n_seen;
    return n_seen ? cudaSuccess : done(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return n_seen ? cudaSuccess : done(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
    if (device >= 0 && device < n_seen) current = device;
    return use_card(device, __func__);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    (void)flags;
    NEEDS_CONTEXT;
    return use_card(peer, __func__);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
    if (device < 0 || device >= n_seen) return done(cudaErrorInvalidDevice);
    snprintf(text, (size_t)length, "0000:%02x:00.0", seen[device] + 1);
    return cudaSuccess;
}

static int is_blackwell(const card *each) { return each->major >= 12; }

/* Limits by compute capability, from the tables of NVIDIA's CUDA C++ programming guide. */
static int threads_of(const card *each) { return is_blackwell(each) || each->major == 8 ? 1536 : 2048; }
static int shared_kib_of(const card *each) { return is_blackwell(each) || each->major == 8 ? 100 : 228; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    if (device < 0 || device >= n_seen) return done(cudaErrorInvalidDevice);
    const card *own = &all_cards[seen[device]];
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "NVIDIA %s", own->name);
    found->uuid.bytes[3] = (char)(seen[device] + 1);
    found->totalGlobalMem = (size_t)own->total_bytes;
    found->major = own->major, found->minor = own->minor;
    found->warpSize = 32;
    found->multiProcessorCount = 128;
    found->sharedMemPerBlock = 48 << 10;
    found->sharedMemPerBlockOptin = (size_t)(shared_kib_of(own) - 1) << 10;
    found->sharedMemPerMultiprocessor = (size_t)shared_kib_of(own) << 10;
    found->regsPerBlock = found->regsPerMultiprocessor = 1 << 16;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = threads_of(own);
    found->pciBusID = seen[device] + 1;
    found->canMapHostMemory = found->concurrentKernels = found->unifiedAddressing = found->cooperativeLaunch = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp all;
    cudaError_t error = cudaGetDeviceProperties(&all, device);
    if (error != cudaSuccess) return error;
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = all.multiProcessorCount; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = all.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)all.sharedMemPerMultiprocessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)all.sharedMemPerBlockOptin; break;
        case cudaDevAttrComputeCapabilityMajor: *value = all.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = all.minor; break;
        case cudaDevAttrWarpSize: *value = all.warpSize; break;
        case cudaDevAttrCooperativeLaunch: *value = 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
        default: return "an error of the stand-in";
    }
}

cudaError_t cudaPeekAtLastError(void) { return sticky; }

cudaError_t cudaGetLastError(void) {
    cudaError_t error = sticky;
    sticky = cudaSuccess;
    return error;
}

/* ---- kernels, of which only the launch is seen ---- */

typedef struct { unsigned x, y, z; } extent;
static __thread struct { extent grid, block; size_t shared; void *stream; } pushed;

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    (void)binary;
    return &handle;
}

unsigned __cudaPushCallConfiguration(extent grid, extent block, size_t shared, void *stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(extent *grid, extent *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(const void **kernel, const void *entry) {
    *kernel = entry;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    (void)kernel;
    NEEDS_CONTEXT;
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 128;
    found->ptxVersion = found->binaryVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *kernel, int threads, size_t shared, unsigned flags) {
    (void)kernel, (void)flags;
    const card *own = &all_cards[seen[current]];
    int by_threads = threads_of(own) / threads;
    int by_shared = (int)(((size_t)shared_kib_of(own) << 10) / (shared + 1024));
    int by_registers = (1 << 16) / (threads * 128);
    int least = by_threads < by_shared ? by_threads : by_shared;
    *blocks = least < by_registers ? least : by_registers;
    if (*blocks < 1) *blocks = 1;
    return cudaSuccess;
}

/* ---- calls that make an object of no content, and calls that do nothing ---- */

/* Prototypes without arguments: the callers pass some, which are not read. */
#define DOES_NOTHING(name) int name() { return 0; }
#define USES_THE_CARD(name) cudaError_t name() { NEEDS_CONTEXT; return cudaSuccess; }
#define MAKES_OBJECT(name) \
    cudaError_t name(void **out) { NEEDS_CONTEXT; *out = malloc(16); return cudaSuccess; }
#define ENDS_OBJECT(name) cudaError_t name(void *object) { free(object); return cudaSuccess; }

MAKES_OBJECT(cudaStreamCreateWithFlags) ENDS_OBJECT(cudaStreamDestroy)
MAKES_OBJECT(cudaEventCreateWithFlags) ENDS_OBJECT(cudaEventDestroy)
MAKES_OBJECT(cudaGraphInstantiate) ENDS_OBJECT(cudaGraphDestroy) ENDS_OBJECT(cudaGraphExecDestroy)
USES_THE_CARD(cudaSetDeviceFlags) USES_THE_CARD(cudaDeviceSynchronize) USES_THE_CARD(cudaStreamSynchronize)
USES_THE_CARD(cudaFuncSetAttribute) USES_THE_CARD(__cudaLaunchKernel) USES_THE_CARD(cudaLaunchKernelExC)
USES_THE_CARD(cudaLaunchCooperativeKernel)
DOES_NOTHING(__cudaRegisterFatBinaryEnd) DOES_NOTHING(__cudaUnregisterFatBinary) DOES_NOTHING(__cudaRegisterFunction)
DOES_NOTHING(__cudaRegisterVar) DOES_NOTHING(cudaStreamWaitEvent) DOES_NOTHING(cudaEventRecord)
DOES_NOTHING(cudaEventSynchronize) DOES_NOTHING(cudaGraphLaunch) DOES_NOTHING(cudaGraphExecUpdate)

static __thread int is_capturing;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    (void)stream, (void)mode;
    is_capturing = 1;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, void **graph) {
    (void)stream;
    is_capturing = 0;
    *graph = malloc(16);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    (void)stream;
    *status = is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

int cublasCreate_v2(void **handle) {
    *handle = malloc(16);
    return 0;
}

int cublasDestroy_v2(void *handle) {
    free(handle);
    return 0;
}

const char *cublasGetStatusString(int status) {
    (void)status;
    return "a status of the stand-in";
}

DOES_NOTHING(cublasSetMathMode) DOES_NOTHING(cublasSetStream_v2) DOES_NOTHING(cublasSetWorkspace_v2)
DOES_NOTHING(cublasGemmEx) DOES_NOTHING(cublasGemmBatchedEx) DOES_NOTHING(cublasGemmStridedBatchedEx)
DOES_NOTHING(cublasSgemm_v2) DOES_NOTHING(cublasSgemmBatched) DOES_NOTHING(cublasSgemmStridedBatched)
DOES_NOTHING(cublasStrsmBatched)

/* ---- NVML, from the same ledger. A reading makes no context. ---- */

enum { NVML_OK = 0, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_TOO_SMALL = 7, NVML_NO_DRIVER = 9 };
typedef struct { char legacy_id[16]; unsigned domain, bus, device, device_id, subsystem_id; char id[32]; } nvml_pci;
typedef struct { unsigned long long total, free, used; } nvml_memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } nvml_process;

/* A handle is the number of the card and 1: NVML ignores CUDA_VISIBLE_DEVICES. */
static int index_of(void *handle) { return (int)(uintptr_t)handle - 1; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)n_all;
    return NVML_OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(uintptr_t)(index + 1);
    return index < (unsigned)n_all ? NVML_OK : NVML_NOT_FOUND;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    *now = *pending = sliced >> (unsigned)index_of(handle) & 1;
    return NVML_OK;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    snprintf(name, length, "NVIDIA %s", all_cards[index_of(handle)].name);
    return NVML_OK;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    write_uuid(index_of(handle), uuid, length);
    return NVML_OK;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = all_cards[index_of(handle)].major, *minor = all_cards[index_of(handle)].minor;
    return NVML_OK;
}

int nvmlDeviceGetPciInfo_v3(void *handle, nvml_pci *found) {
    memset(found, 0, sizeof *found);
    found->bus = (unsigned)index_of(handle) + 1;
    snprintf(found->id, sizeof found->id, "00000000:%02X:00.0", found->bus);
    return NVML_OK;
}

int nvmlDeviceGetMemoryInfo(void *handle, nvml_memory *found) {
    int64_t free_bytes, total_bytes;
    memory_of(index_of(handle), &free_bytes, &total_bytes);
    found->total = (unsigned long long)total_bytes;
    found->free = (unsigned long long)free_bytes;
    found->used = found->total - found->free;
    return NVML_OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, nvml_process *found) {
    unsigned room = *count, n = 0;
    lock();
    for (uint32_t i = 0; i < book->n_processes; i++) {
        process *each = &book->processes[i];
        int64_t used = each->cards[index_of(handle)].used_bytes;
        if (!used || !lives(each)) continue;
        if (n < room) found[n] = (nvml_process){(unsigned)each->pid, (unsigned long long)used, 0, 0};
        n++;
    }
    unlock();
    *count = n;
    return n <= room ? NVML_OK : NVML_TOO_SMALL;
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, nvml_process *found) {
    (void)handle, (void)found;
    *count = 0;
    return NVML_OK;
}

const char *nvmlErrorString(int status) {
    (void)status;
    return "an error of the stand-in";
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return getenv("STAND_IN_NO_NVML") != NULL ? NVML_NO_DRIVER : NVML_OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

#define HAS_NO_SENSOR(name) int name() { return NVML_NOT_SUPPORTED; }
DOES_NOTHING(nvmlShutdown)
HAS_NO_SENSOR(nvmlDeviceGetUtilizationRates) HAS_NO_SENSOR(nvmlDeviceGetTemperature)
HAS_NO_SENSOR(nvmlDeviceGetPowerUsage) HAS_NO_SENSOR(nvmlDeviceGetDisplayActive)
HAS_NO_SENSOR(nvmlDeviceGetMaxPcieLinkGeneration) HAS_NO_SENSOR(nvmlDeviceGetCurrPcieLinkWidth)
