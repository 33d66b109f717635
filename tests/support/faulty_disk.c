/* Preload: a disk with a fault, for files whose path contains FAULTY_DISK_FOLDER. FAULTY_DISK_FAULT says which:
 * "full" (no room after FAULTY_DISK_AFTER bytes), "short" (a write takes one byte less than half), "slow" (a write takes
 * half a millisecond), "readonly" (nothing can be made or opened for writing), "sync" (fsync fails), "rename" (rename fails),
 * "gone" (every write fails), "nth" (the write number FAULTY_DISK_NTH fails, counted from when that was set). FAULTY_DISK_WHILE: the fault is there as long as this file is.
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
    const char * as_long_as = getenv("FAULTY_DISK_WHILE");
    if (as_long_as != NULL && access(as_long_as, F_OK) != 0) return 0;
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

/* How much of a write may be done now; 0 with errno where nothing may. */
static size_t unloads_for(size_t size) {
    if (has("gone")) return refuse(EIO), 0;
    if (has("nth")) {
        static long begun_for, seen;
        const char * wanted = getenv("FAULTY_DISK_NTH");
        long nth = wanted == NULL ? 0 : strtol(wanted, NULL, 10);
        if (nth != begun_for) begun_for = nth, seen = 0;
        if (++seen == nth) return refuse(EIO), 0;
    }
    if (has("slow")) usleep(500);
    if (has("short") && size > 1) return size / 2;
    if (has("full")) {
        const char * after = getenv("FAULTY_DISK_AFTER");
        size_t room = after == NULL ? 0 : strtoull(after, NULL, 10);
        if (written >= room) return refuse(ENOSPC), 0;
        if (size > room - written) return room - written;
    }
    return size;
}

ssize_t write(int file, const void * data, size_t size) {
    static ssize_t (*next)(int, const void *, size_t);
    if (next == NULL) next = (ssize_t (*)(int, const void *, size_t)) dlsym(RTLD_NEXT, "write");
    if (size == 0 || !is_our_file(file)) return next(file, data, size);
    size = unloads_for(size);
    ssize_t done = size == 0 ? -1 : next(file, data, size);
    if (done > 0) written += (size_t) done;
    return done;
}

static ssize_t write_at(const char * name, int file, const void * data, size_t size, off_t at) {
    ssize_t (*next)(int, const void *, size_t, off_t) =
        (ssize_t (*)(int, const void *, size_t, off_t)) dlsym(RTLD_NEXT, name);
    if (size == 0 || !is_our_file(file)) return next(file, data, size, at);
    size = unloads_for(size);
    ssize_t done = size == 0 ? -1 : next(file, data, size, at);
    if (done > 0) written += (size_t) done;
    return done;
}

ssize_t pwrite(int file, const void * data, size_t size, off_t at) {
    return write_at("pwrite", file, data, size, at);
}

ssize_t pwrite64(int file, const void * data, size_t size, off_t at) {
    return write_at("pwrite64", file, data, size, at);
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
