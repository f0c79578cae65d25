/* Faults in the system calls on the files below one directory, for LD_PRELOAD.

KVBM_FAULTS_DIR is that directory, KVBM_FAULTS_PLAN a file with a `struct plan` that tests write while
this runs. Of each call in the table so many in 65,536 fail: with an errno of the call, cut short, or
late. What io_uring is given is changed before the kernel sees it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/io_uring.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum site { OPEN, READ, PREADV, WRITE, PWRITE, FDATASYNC, FSYNC, FTRUNCATE, FALLOCATE, RENAME,
            UNLINK, MKDIR, FLOCK, CLOSE, URING_READ, URING_WRITE, SITES };
enum kind { NONE, FAIL, SHORT, LATE, KINDS };

struct plan {
    uint64_t draws;
    uint32_t on, rate;
    uint64_t seed;
    uint64_t only; /* Sites, one bit each, where every call fails; 0: all sites, by the rate. */
    uint64_t calls[SITES];
    uint64_t faults[SITES][KINDS];
};

static struct plan *plan;
static const char *directory;
static size_t directory_length;
static unsigned char tracked[65536];

__attribute__((constructor)) static void begin(void) {
    directory = getenv("KVBM_FAULTS_DIR");
    const char *path = getenv("KVBM_FAULTS_PLAN");
    if (!directory || !path) return;
    directory_length = strlen(directory);
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = real(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    plan = mmap(0, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (plan == MAP_FAILED) plan = 0;
    close(fd);
}

static uint64_t draw(void) { /* splitmix64 over a counter: threads may share it. */
    uint64_t x = plan->seed + 0x9e3779b97f4a7c15ull * __atomic_add_fetch(&plan->draws, 1, __ATOMIC_RELAXED);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static enum kind fault(enum site site, int may_be_short) {
    if (!plan) return NONE;
    __atomic_add_fetch(&plan->calls[site], 1, __ATOMIC_RELAXED);
    if (!plan->on) return NONE;
    if (plan->only) {
        if (!(plan->only >> site & 1)) return NONE;
        __atomic_add_fetch(&plan->faults[site][FAIL], 1, __ATOMIC_RELAXED);
        return FAIL;
    }
    uint64_t x = draw();
    if ((x & 0xffff) >= plan->rate) return NONE;
    enum kind kind = (x >> 16) % 8 == 0 ? LATE : may_be_short && (x >> 16) % 8 < 4 ? SHORT : FAIL;
    __atomic_add_fetch(&plan->faults[site][kind], 1, __ATOMIC_RELAXED);
    if (kind == LATE) usleep((x >> 24) % 20000);
    return kind;
}

static int code(enum site site) {
    static const int codes[3] = {EIO, ENOSPC, EROFS};
    int reads = site == READ || site == PREADV || site == FDATASYNC || site == FSYNC || site == CLOSE;
    return reads ? EIO : codes[draw() % 3];
}

static int ours(const char *path) {
    return plan && path && strncmp(path, directory, directory_length) == 0;
}

static int is_tracked(int fd) { return plan && fd >= 0 && fd < (int)sizeof tracked && tracked[fd]; }

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = dlsym(RTLD_NEXT, name)
#define FAILS(site) if (fault(site, 0) == FAIL) { errno = code(site); return -1; }

static int open_any(const char *name, const char *path, int flags, mode_t mode) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);
    if (!ours(path)) return real(path, flags, mode);
    FAILS(OPEN)
    int fd = real(path, flags, mode);
    if (fd >= 0 && fd < (int)sizeof tracked) tracked[fd] = 1;
    return fd;
}

#define OPENS(symbol) \
    int symbol(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        return open_any(#symbol, path, flags, mode); }
OPENS(open)
OPENS(open64)

ssize_t read(int fd, void *to, size_t size) {
    REAL(ssize_t, "read", int, void *, size_t);
    if (!is_tracked(fd)) return real(fd, to, size);
    FAILS(READ)
    return real(fd, to, size);
}

#define PREADVS(symbol, offset_t) \
    ssize_t symbol(int fd, const struct iovec *to, int count, offset_t at) { \
        REAL(ssize_t, #symbol, int, const struct iovec *, int, offset_t); \
        if (!is_tracked(fd)) return real(fd, to, count, at); \
        FAILS(PREADV) \
        return real(fd, to, count, at); }
PREADVS(preadv, off_t)
PREADVS(preadv64, off64_t)

#define PREADV2S(symbol, offset_t) \
    ssize_t symbol(int fd, const struct iovec *to, int count, offset_t at, int flags) { \
        REAL(ssize_t, #symbol, int, const struct iovec *, int, offset_t, int); \
        if (!is_tracked(fd)) return real(fd, to, count, at, flags); \
        FAILS(PREADV) \
        return real(fd, to, count, at, flags); }
PREADV2S(preadv2, off_t)
PREADV2S(preadv64v2, off64_t)

ssize_t write(int fd, const void *from, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (!is_tracked(fd)) return real(fd, from, size);
    enum kind kind = fault(WRITE, 1);
    if (kind == FAIL) { errno = code(WRITE); return -1; }
    return real(fd, from, kind == SHORT ? (size + 1) / 2 : size);
}

#define PWRITES(symbol, offset_t) \
    ssize_t symbol(int fd, const void *from, size_t size, offset_t at) { \
        REAL(ssize_t, #symbol, int, const void *, size_t, offset_t); \
        if (!is_tracked(fd)) return real(fd, from, size, at); \
        enum kind kind = fault(PWRITE, 1); \
        if (kind == FAIL) { errno = code(PWRITE); return -1; } \
        return real(fd, from, kind == SHORT ? (size + 1) / 2 : size, at); }
PWRITES(pwrite, off_t)
PWRITES(pwrite64, off64_t)

#define ON_FD(symbol, site) \
    int symbol(int fd) { \
        REAL(int, #symbol, int); \
        if (!is_tracked(fd)) return real(fd); \
        FAILS(site) \
        return real(fd); }
ON_FD(fdatasync, FDATASYNC)
ON_FD(fsync, FSYNC)

int close(int fd) { /* The file is closed, whatever the error says. */
    REAL(int, "close", int);
    if (!is_tracked(fd)) return real(fd);
    enum kind kind = fault(CLOSE, 0);
    tracked[fd] = 0;
    int result = real(fd);
    if (kind == FAIL) { errno = EIO; return -1; }
    return result;
}

#define FTRUNCATES(symbol, offset_t) \
    int symbol(int fd, offset_t size) { \
        REAL(int, #symbol, int, offset_t); \
        if (is_tracked(fd)) { FAILS(FTRUNCATE) } \
        return real(fd, size); }
FTRUNCATES(ftruncate, off_t)
FTRUNCATES(ftruncate64, off64_t)

int fallocate(int fd, int mode, off_t at, off_t size) {
    REAL(int, "fallocate", int, int, off_t, off_t);
    if (is_tracked(fd)) { FAILS(FALLOCATE) }
    return real(fd, mode, at, size);
}

int flock(int fd, int operation) {
    REAL(int, "flock", int, int);
    if (is_tracked(fd)) { FAILS(FLOCK) }
    return real(fd, operation);
}

int rename(const char *source, const char *target) {
    REAL(int, "rename", const char *, const char *);
    if (ours(source)) {
        enum kind kind = fault(RENAME, 1);
        if (kind == FAIL) { errno = code(RENAME); return -1; }
        if (kind == SHORT) { real(source, target); errno = EIO; return -1; } /* Done, and failed. */
    }
    return real(source, target);
}

int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    if (ours(path)) { FAILS(UNLINK) }
    return real(path);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    if (ours(path)) { FAILS(MKDIR) }
    return real(path, mode);
}

/* --- io_uring -------------------------------------------------------------------------------- */

struct submission_ring { /* liburing 2.2 and later. */
    unsigned *khead, *ktail, *kring_mask, *kring_entries, *kflags, *kdropped, *array;
    struct io_uring_sqe *sqes;
    unsigned sqe_head, sqe_tail;
    size_t ring_size;
    void *ring;
    unsigned ring_mask, ring_entries;
};

static int find_library(struct dl_phdr_info *info, size_t size, void *found) {
    (void)size;
    if (!info->dlpi_name || !strstr(info->dlpi_name, "liburing")) return 0;
    *(const char **)found = info->dlpi_name;
    return 1;
}

int io_uring_submit(struct submission_ring *ring) {
    static int (*real)(struct submission_ring *);
    if (!real) {
        const char *name = 0;
        dl_iterate_phdr(find_library, &name);
        void *library = name ? dlopen(name, RTLD_NOLOAD | RTLD_LAZY) : 0;
        real = library ? dlsym(library, "io_uring_submit") : 0;
        if (!real) return -ENOSYS;
    }
    for (unsigned at = ring->sqe_head; at != ring->sqe_tail; at++) {
        struct io_uring_sqe *one = &ring->sqes[at & ring->ring_mask];
        int reads = one->opcode == IORING_OP_READ || one->opcode == IORING_OP_READV;
        int writes = one->opcode == IORING_OP_WRITE || one->opcode == IORING_OP_WRITEV;
        if (!(reads || writes) || !is_tracked(one->fd)) continue;
        int whole = one->opcode == IORING_OP_READ || one->opcode == IORING_OP_WRITE;
        enum kind kind = fault(reads ? URING_READ : URING_WRITE, whole && one->len > 4096);
        if (kind == FAIL) one->fd = -1;
        if (kind == SHORT) one->len = one->len / 2 / 4096 * 4096;
    }
    return real(ring);
}
