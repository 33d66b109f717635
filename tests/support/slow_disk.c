/* Preload: a disk that stops delivering. Reads of a file named in SLOW_DISK_FILE wait for ever once SLOW_DISK_AFTER
 * bytes of it were read; everything else is as it was.
 *
 * Build: cc -O1 -shared -fPIC slow_disk.c -o libslow_disk.so -ldl;  use: LD_PRELOAD=./libslow_disk.so
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static size_t delivered;

static void deliver(int file, size_t length) {
    char link[64], path[PATH_MAX];
    const char * slow = getenv("SLOW_DISK_FILE");
    const char * after = getenv("SLOW_DISK_AFTER");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (slow == NULL || after == NULL || size < 0) return;
    path[size] = 0;
    if (strcmp(path, slow) != 0) return;
    delivered += length;
    while (delivered > strtoull(after, NULL, 10)) pause();
}

size_t fread(void * data, size_t size, size_t count, FILE * stream) {
    static size_t (*next)(void *, size_t, size_t, FILE *);
    if (next == NULL) next = (size_t (*)(void *, size_t, size_t, FILE *)) dlsym(RTLD_NEXT, "fread");
    deliver(fileno(stream), size * count);
    return next(data, size, count, stream);
}

ssize_t read(int file, void * data, size_t size) {
    static ssize_t (*next)(int, void *, size_t);
    if (next == NULL) next = (ssize_t (*)(int, void *, size_t)) dlsym(RTLD_NEXT, "read");
    deliver(file, size);
    return next(file, data, size);
}
