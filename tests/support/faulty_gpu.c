/* Preload: a Vulkan device with a fault. FAULTY_GPU_FAULT says which: "lost" (the device is gone: nothing that is
 * submitted is computed), "memory" (no more than FAULTY_GPU_ROOM bytes are given out). With FAULTY_GPU_WHEN the fault
 * begins when that file exists.
 *
 * Build: cc -O1 -shared -fPIC faulty_gpu.c -o libfaulty_gpu.so -ldl;  use: LD_PRELOAD=./libfaulty_gpu.so
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What of Vulkan's interface is used here: its headers need not be installed. */
typedef void (*function)(void);
typedef function (*get_function)(void *, const char *);
typedef struct {
    int32_t type;
    const void * next;
    uint64_t size;
    uint32_t memory_type;
} allocation;

enum { out_of_device_memory = -2, device_lost = -4 };

static get_function next_of_instance, next_of_device;
static int32_t (*next_submit)(void *, uint32_t, const void *, void *);
static int32_t (*next_wait)(void *, uint32_t, const void *, uint32_t, uint64_t);
static int32_t (*next_status)(void *, void *);
static int32_t (*next_allocate)(void *, const allocation *, const void *, void *);
static uint64_t given;

static int has(const char * fault) {
    const char * wanted = getenv("FAULTY_GPU_FAULT");
    const char * when = getenv("FAULTY_GPU_WHEN");
    return wanted != NULL && strcmp(wanted, fault) == 0 && (when == NULL || access(when, F_OK) == 0);
}

static int32_t submit(void * queue, uint32_t count, const void * work, void * fence) {
    return has("lost") ? device_lost : next_submit(queue, count, work, fence);
}

static int32_t wait_for(void * device, uint32_t count, const void * fences, uint32_t all, uint64_t timeout) {
    return has("lost") ? device_lost : next_wait(device, count, fences, all, timeout);
}

static int32_t status(void * device, void * fence) {
    return has("lost") ? device_lost : next_status(device, fence);
}

static int32_t allocate(void * device, const allocation * wanted, const void * callbacks, void * memory) {
    const char * room = getenv("FAULTY_GPU_ROOM");
    if (has("memory") && (room == NULL || given + wanted->size > strtoull(room, NULL, 10))) return out_of_device_memory;
    int32_t result = next_allocate(device, wanted, callbacks, memory);
    if (result == 0) given += wanted->size;
    return result;
}

static function of_device(void * device, const char * name);

static function ours(const char * name, function theirs) {
    if (theirs == NULL) return NULL;
    if (strcmp(name, "vkGetDeviceProcAddr") == 0) {
        next_of_device = (get_function) theirs;
        return (function) of_device;
    }
    if (strcmp(name, "vkQueueSubmit") == 0) {
        next_submit = (int32_t (*)(void *, uint32_t, const void *, void *)) theirs;
        return (function) submit;
    }
    if (strcmp(name, "vkWaitForFences") == 0) {
        next_wait = (int32_t (*)(void *, uint32_t, const void *, uint32_t, uint64_t)) theirs;
        return (function) wait_for;
    }
    if (strcmp(name, "vkGetFenceStatus") == 0) {
        next_status = (int32_t (*)(void *, void *)) theirs;
        return (function) status;
    }
    if (strcmp(name, "vkAllocateMemory") == 0) {
        next_allocate = (int32_t (*)(void *, const allocation *, const void *, void *)) theirs;
        return (function) allocate;
    }
    return theirs;
}

static function of_device(void * device, const char * name) {
    return ours(name, next_of_device(device, name));
}

function vkGetInstanceProcAddr(void * instance, const char * name) {
    if (next_of_instance == NULL) {
        /* The engine's libraries are not in the scope of the whole process, so that there is no next one here. */
        void * loader = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
        if (loader != NULL) next_of_instance = (get_function) dlsym(loader, "vkGetInstanceProcAddr");
    }
    return next_of_instance == NULL ? NULL : ours(name, next_of_instance(instance, name));
}
