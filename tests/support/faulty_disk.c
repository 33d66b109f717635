/* Preload: a disk with a fault, for files whose path contains FAULTY_DISK_FOLDER. FAULTY_DISK_FAULT says which:
 * "full" (no room after FAULTY_DISK_AFTER bytes), "short" (a write takes one byte less than half), "slow" (a write takes
 * half a millisecond), "readonly" (nothing can be made or opened for writing), "sync" (fsync fails), "rename" (rename fails),
 * "gone" (every write fails). Writes at a place, as a database makes them, find no room at all with "full".
 *
 * Build: cc -O1 -shared -fPIC faulty_disk.c -o libfaulty_disk.so -ldl;  use: LD_PRELOAD=./libfaulty_disk.so
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static size_t written;

static int has(const char * fault) {
    const char * wanted = getenv("FAULTY_DISK_FAULT");
    return wanted != NULL && strcmp(wanted, fault) == 0;
}

static int is_ours(const char * path) {
    const char * folder = getenv("FAULTY_DISK_FOLDER");
    return folder != NULL && path != NULL && strstr(path, folder) != NULL;
}

static int is_our_file(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_ours(path);
}

static int refuse(int error) {
    errno = error;
    return -1;
}

ssize_t write(int file, const void * data, size_t size) {
    static ssize_t (*next)(int, const void *, size_t);
    if (next == NULL) next = (ssize_t (*)(int, const void *, size_t)) dlsym(RTLD_NEXT, "write");
    if (size == 0 || !is_our_file(file)) return next(file, data, size);
    if (has("gone")) return refuse(EIO);
    if (has("slow")) usleep(500);
    if (has("short") && size > 1) size = size / 2;
    if (has("full")) {
        const char * after = getenv("FAULTY_DISK_AFTER");
        size_t room = after == NULL ? 0 : strtoull(after, NULL, 10);
        if (written >= room) return refuse(ENOSPC);
        if (size > room - written) size = room - written;
    }
    ssize_t done = next(file, data, size);
    if (done > 0) written += (size_t) done;
    return done;
}

ssize_t pwrite64(int file, const void * data, size_t size, off64_t place) {
    static ssize_t (*next)(int, const void *, size_t, off64_t);
    if (next == NULL) next = (ssize_t (*)(int, const void *, size_t, off64_t)) dlsym(RTLD_NEXT, "pwrite64");
    if (size == 0 || !is_our_file(file)) return next(file, data, size, place);
    if (has("gone")) return refuse(EIO);
    if (has("full")) return refuse(ENOSPC);
    return next(file, data, has("short") && size > 1 ? size / 2 : size, place);
}

int fsync(int file) {
    static int (*next)(int);
    if (next == NULL) next = (int (*)(int)) dlsym(RTLD_NEXT, "fsync");
    return has("sync") && is_our_file(file) ? refuse(EIO) : next(file);
}

int rename(const char * from, const char * to) {
    static int (*next)(const char *, const char *);
    if (next == NULL) next = (int (*)(const char *, const char *)) dlsym(RTLD_NEXT, "rename");
    return has("rename") && is_ours(to) ? refuse(EIO) : next(from, to);
}

static int open_file(const char * name, const char * path, int flags, mode_t mode) {
    int (*next)(const char *, int, ...) = (int (*)(const char *, int, ...)) dlsym(RTLD_NEXT, name);
    if (has("readonly") && is_ours(path) && (flags & (O_WRONLY | O_RDWR | O_CREAT))) return refuse(EROFS);
    return next(path, flags, mode);
}

int open(const char * path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return open_file("open", path, flags, mode);
}

int open64(const char * path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    return open_file("open64", path, flags, mode);
}
