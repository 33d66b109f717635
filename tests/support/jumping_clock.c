/* Preload: the clock of the wall jumps by up to two days at each look, forwards and backwards; other clocks are right.
 *
 * Build: cc -O1 -shared -fPIC jumping_clock.c -o libjumping_clock.so -ldl;  use: LD_PRELOAD=./libjumping_clock.so
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>

static long jump(void) {
    static const long days[] = {0, 2, -1, 1, -2};
    static unsigned looks;
    return days[__atomic_add_fetch(&looks, 1, __ATOMIC_RELAXED) % 5] * 86400L;
}

int clock_gettime(clockid_t clock, struct timespec * found) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, found);
    if (status == 0 && clock == CLOCK_REALTIME) found->tv_sec += jump();
    return status;
}

time_t time(time_t * found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found != NULL) *found = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval * found, void * zone) {
    struct timespec now;
    (void) zone;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}
