/* Record the side effects of koalapy's processes, kill a process before or after one, and journal writes.
 *
 * Preloaded (LD_PRELOAD) into daemon, agents, resource managers and runners. It wraps the functions of the C library
 * that change something outside the process. The environment variable CRASH_CONTROL names a folder:
 *
 *   root     the folder whose files are watched
 *   plan     "KIND EFFECT OBJECT PLACE before|after N": kill the process at the N-th time, or nothing
 *   counter  8 bytes shared by all processes: how often the planned effect was reached
 *   points   one line for each effect: KIND EFFECT OBJECT PLACE
 *   writes   if it exists: each change of a file or folder below root, with its content (see power_loss.py)
 *
 * PLACE is the innermost line of koalapy of the thread that causes the effect.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define CAPTURED (-7777) /* the file to which a traceback is written: the buffer of the thread */
#define MAX_DATA (1 << 26)

extern char **environ;

static char control[PATH_MAX], root[PATH_MAX], library[PATH_MAX], boot[PATH_MAX], kind[16];
static char planned_kind[16], planned_effect[16], planned_object[128], planned_place[256];
static int planned_after, points_file = -1, writes_file = -1, lock_file = -1, lock_owner;
static uint64_t planned_count, *counter;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int is_inside;
static __thread char traceback[8192];
static __thread size_t traceback_size;

#define REAL(name) static __typeof__(&name) real_##name; if (!real_##name) real_##name = dlsym(RTLD_NEXT, #name)

static ssize_t raw_write(int fd, const void *data, size_t size) {
    REAL(write);
    return real_write(fd, data, size);
}

static void read_control(const char *name, char *text, size_t size) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/%s", control, name);
    int fd = (int)open(path, O_RDONLY | O_CLOEXEC);
    ssize_t count = fd < 0 ? 0 : read(fd, text, size - 1);
    if (fd >= 0) close(fd);
    text[count > 0 ? count : 0] = 0;
    text[strcspn(text, "\n")] = 0;
}

static int open_control(const char *name, int flags) {
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/%s", control, name);
    int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0) return fd;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 800); /* programs close or count low numbers */
    if (high < 0) return fd;
    close(fd);
    return high;
}

/* Set the kind of this process by its command line; others keep none, and are not recorded. */
static void find_kind(void) {
    char text[8192];
    int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    for (ssize_t k = 0; k < size; k++) if (!text[k]) text[k] = ' ';
    text[size > 0 ? size : 0] = 0;
    const char *found = strstr(text, "locald.py") ? "manager"
        : strstr(text, "koalapy.cli.main serve") ? "daemon"
        : strstr(text, "koalapy.cli.main agent") ? "agent"
        : strstr(text, "runner.py") ? "runner" : "";
    strcpy(kind, found);
}

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("CRASH_CONTROL");
    if (!folder || strlen(folder) > PATH_MAX - 32) return;
    is_inside = 1;
    strcpy(control, folder);
    snprintf(library, sizeof library, "%s", getenv("LD_PRELOAD") ? getenv("LD_PRELOAD") : "");
    read_control("root", root, sizeof root);
    read_control("boot", boot, sizeof boot);
    find_kind();
    char plan[1024], when[16] = "";
    unsigned long count = 0;
    read_control("plan", plan, sizeof plan);
    if (sscanf(plan, "%15s %15s %127s %255s %15s %lu", planned_kind, planned_effect, planned_object, planned_place, when, &count) == 6)
        planned_count = count;
    planned_after = !strcmp(when, "after");
    points_file = open_control("points", O_WRONLY | O_APPEND);
    writes_file = open_control("writes", O_WRONLY | O_APPEND);
    int fd = open_control("counter", O_RDWR);
    if (fd >= 0) {
        void *shared = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (shared != MAP_FAILED) counter = shared;
        close(fd);
    }
    is_inside = 0;
}

/* Write "FILE:LINE" of the innermost frame of koalapy, or "-". */
static void find_place(char *place, size_t size) {
    static void (*dump)(int, void *);
    static void *(*state)(void);
    static int is_searched;
    if (!is_searched) {
        dump = (void (*)(int, void *))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
        state = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
        is_searched = 1;
    }
    strcpy(place, "-");
    void *thread = dump && state ? state() : NULL;
    if (!thread) return;
    traceback_size = 0;
    dump(CAPTURED, thread);
    traceback[traceback_size] = 0;
    char *found = strstr(traceback, "/koalapy/");
    while (found && !strncmp(found, "/koalapy/cli/", 13)) found = strstr(found + 9, "/koalapy/");
    if (!found) return;
    char file[200] = "";
    int line = 0;
    if (sscanf(found + 9, "%199[^\"]\", line %d", file, &line) == 2) snprintf(place, size, "%s:%d", file, line);
}

/* Write a path's last name, with # for each run of hexadecimal digits that has one from 0 to 9. */
static void name_object(const char *path, char *object, size_t size) {
    const char *c = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
    size_t length = 0;
    while (*c && length < size - 40) {
        size_t run = strspn(c, "0123456789abcdef"), digits = strcspn(c, "0123456789");
        if (run && digits < run) {
            object[length++] = '#';
            c += run;
        } else
            for (run = run ? run : 1; run && length < size - 40; run--, c++) object[length++] = *c == ' ' ? '_' : *c;
    }
    object[length] = 0;
    if (!length) strcpy(object, "-");
}

static int is_below(const char *path) { return *root && !strncmp(path, root, strlen(root)); }

static int is_watched(int fd, char *path) {
    char link[64];
    struct stat status;
    if (!*root || fd < 0 || fstat(fd, &status) || !(S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size > 0 ? size : 0] = 0;
    return is_below(path);
}

/* Write the absolute path of a name in an open folder; the last name itself is not followed. */
static int find_path(int folder, const char *name, char *path) {
    char whole[2 * PATH_MAX], parent[2 * PATH_MAX], resolved[PATH_MAX];
    if (!name) return 0;
    if (name[0] == '/') snprintf(whole, sizeof whole, "%s", name);
    else if (folder == AT_FDCWD) {
        char here[PATH_MAX];
        if (!getcwd(here, sizeof here)) return 0;
        snprintf(whole, sizeof whole, "%s/%s", here, name);
    } else snprintf(whole, sizeof whole, "/proc/self/fd/%d/%s", folder, name);
    size_t length = strlen(whole);
    while (length > 1 && whole[length - 1] == '/') whole[--length] = 0;
    strcpy(parent, whole);
    char *slash = strrchr(parent, '/');
    const char *last = strrchr(whole, '/') + 1;
    if (slash == parent) strcpy(resolved, "/");
    else {
        *slash = 0;
        if (!realpath(parent, resolved)) return 0;
    }
    if (strlen(resolved) + strlen(last) + 2 > PATH_MAX) return 0;
    snprintf(path, PATH_MAX, "%s/%s", strcmp(resolved, "/") ? resolved : "", last);
    return is_below(path);
}

static void die(void) {
    int fd = open_control("crashed", O_WRONLY | O_APPEND);
    char text[400];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int size = snprintf(text, sizeof text, "%s %d %ld.%09ld\n", kind, getpid(), (long)now.tv_sec, now.tv_nsec);
    if (fd >= 0) raw_write(fd, text, size);
    REAL(kill);
    real_kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Record an effect that is about to happen; kill the process if that is planned before it. Return whether the process
 * is to be killed after it. */
static int reach(const char *effect, const char *object) {
    if (is_inside || !*kind || points_file < 0) return 0;
    int error = errno, is_due = 0;
    is_inside = 1;
    char place[256], line[512];
    find_place(place, sizeof place);
    int size = snprintf(line, sizeof line, "%s %s %s %s\n", kind, effect, object, place);
    raw_write(points_file, line, size);
    if (planned_count && counter && !strcmp(kind, planned_kind) && !strcmp(effect, planned_effect)
        && !strcmp(object, planned_object) && !strcmp(place, planned_place)) {
        is_due = __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST) == planned_count;
        if (is_due && !planned_after) die();
    }
    is_inside = 0;
    errno = error;
    return is_due;
}

static int reach_path(const char *effect, const char *path) {
    char object[128];
    name_object(path, object, sizeof object);
    return reach(effect, object);
}

/* Record a write to a socket, a pipe or a watched file. */
static int reach_file(const char *effect, int fd, size_t size, int *is_changed) {
    *is_changed = 0;
    if (is_inside || !*control || fd == 1 || fd == 2 || fd < 0) return 0;
    int error = errno, is_due = 0;
    char path[PATH_MAX];
    struct stat status;
    if (!fstat(fd, &status)) {
        if (S_ISSOCK(status.st_mode)) {
            struct sockaddr_storage own;
            socklen_t length = sizeof own;
            int is_named = !getsockname(fd, (struct sockaddr *)&own, &length);
            const char *object = !is_named ? "socket" : own.ss_family != AF_UNIX ? "tcp" : "unix";
            if (own.ss_family != AF_UNIX || size > 1) is_due = reach("send", object); /* one byte wakes a loop */
        } else if (S_ISFIFO(status.st_mode)) is_due = reach("send", "pipe");
        else if (is_watched(fd, path)) {
            *is_changed = 1;
            is_due = reach_path(effect, path);
        }
    }
    errno = error;
    return is_due;
}

/* The journal of writes */

static int lock(void) {
    if (writes_file < 0) return 0;
    is_inside++;
    pthread_mutex_lock(&mutex);
    if (lock_owner != getpid()) { /* a fork shares the lock of its parent */
        if (lock_file >= 0) close(lock_file);
        lock_file = open_control("lock", O_RDWR);
        lock_owner = getpid();
    }
    flock(lock_file, LOCK_EX);
    return 1;
}

static void unlock(int is_locked) {
    if (!is_locked) return;
    int error = errno;
    flock(lock_file, LOCK_UN);
    pthread_mutex_unlock(&mutex);
    is_inside--;
    errno = error;
}

struct record {
    uint32_t size; /* of the whole record */
    uint32_t change;
    double time;
    uint64_t file; /* inode */
    int64_t offset;
    uint32_t path_size, target_size, data_size, mode;
};

static void journal(char change, uint64_t file, int64_t offset, const char *path, const char *target, const struct iovec *parts, int count, size_t data_size, uint32_t mode) {
    int error = errno;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    struct record record = {0, (uint32_t)change, now.tv_sec + now.tv_nsec / 1e9, file, offset,
        path ? strlen(path) : 0, target ? strlen(target) : 0, data_size, mode};
    record.size = sizeof record + record.path_size + record.target_size + record.data_size;
    char *buffer = malloc(record.size), *end = buffer;
    memcpy(end, &record, sizeof record);
    end += sizeof record;
    if (path) memcpy(end, path, record.path_size);
    end += record.path_size;
    if (target) memcpy(end, target, record.target_size);
    end += record.target_size;
    for (int k = 0; k < count && data_size; k++) {
        size_t size = parts[k].iov_len < data_size ? parts[k].iov_len : data_size;
        memcpy(end, parts[k].iov_base, size);
        end += size, data_size -= size;
    }
    raw_write(writes_file, buffer, record.size);
    free(buffer);
    errno = error;
}

static void journal_data(int fd, int64_t offset, const struct iovec *parts, int count, ssize_t size) {
    struct stat status;
    if (size < 0 || fstat(fd, &status)) return;
    journal('W', status.st_ino, offset >= 0 ? offset : lseek(fd, 0, SEEK_CUR) - size, NULL, NULL, parts, count, size, 0);
}

static void journal_file(char change, int fd, int64_t offset) {
    struct stat status;
    if (!fstat(fd, &status)) journal(change, status.st_ino, offset, NULL, NULL, NULL, 0, 0, S_ISDIR(status.st_mode));
}

/* Writes */

#define WRITES(call, parts, part_count, position) \
    int is_changed, is_due = reach_file("write", fd, size, &is_changed), is_locked = is_changed && lock(); \
    ssize_t result = call; \
    if (is_locked) journal_data(fd, position, parts, part_count, result); \
    unlock(is_locked); \
    if (is_due) die(); \
    return result

ssize_t write(int fd, const void *data, size_t size) {
    if (fd == CAPTURED) {
        size_t room = sizeof traceback - 1 - traceback_size, count = size < room ? size : room;
        memcpy(traceback + traceback_size, data, count);
        traceback_size += count;
        return size;
    }
    REAL(write);
    struct iovec part = {(void *)data, size};
    WRITES(real_write(fd, data, size), &part, 1, -1);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    REAL(pwrite);
    struct iovec part = {(void *)data, size};
    WRITES(real_pwrite(fd, data, size, offset), &part, 1, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    struct iovec part = {(void *)data, size};
    WRITES(real_pwrite64(fd, data, size, offset), &part, 1, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    size_t size = 0;
    for (int k = 0; k < count; k++) size += parts[k].iov_len;
    WRITES(real_writev(fd, parts, count), parts, count, -1);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    REAL(pwritev);
    size_t size = 2;
    WRITES(real_pwritev(fd, parts, count, offset), parts, count, offset);
}

ssize_t sendfile(int fd, int from, off_t *offset, size_t size) {
    REAL(sendfile);
    int is_changed, is_due = reach_file("write", fd, size, &is_changed);
    if (is_changed && writes_file >= 0) { errno = ENOTSOCK; return -1; } /* Python then copies by read and write */
    ssize_t result = real_sendfile(fd, from, offset, size);
    if (is_due) die();
    return result;
}

ssize_t sendfile64(int fd, int from, off64_t *offset, size_t size) { return sendfile(fd, from, (off_t *)offset, size); }

ssize_t send(int fd, const void *data, size_t size, int flags) {
    REAL(send);
    int is_changed, is_due = reach_file("send", fd, size, &is_changed);
    ssize_t result = real_send(fd, data, size, flags);
    if (is_due) die();
    return result;
}

ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length) {
    REAL(sendto);
    int is_changed, is_due = reach_file("send", fd, size, &is_changed);
    ssize_t result = real_sendto(fd, data, size, flags, to, length);
    if (is_due) die();
    return result;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    int is_changed, is_due = reach_file("send", fd, 2, &is_changed);
    ssize_t result = real_sendmsg(fd, message, flags);
    if (is_due) die();
    return result;
}

/* Files */

#define CHANGES(type, effect, call, change, offset) \
    char watched[PATH_MAX]; \
    int is_changed = !is_inside && *control && is_watched(fd, watched); \
    int is_due = is_changed && reach_path(effect, watched), is_locked = is_changed && lock(); \
    type result = call; \
    if (is_locked && !result) journal_file(change, fd, offset); \
    unlock(is_locked); \
    if (is_due) die(); \
    return result

int fsync(int fd) { REAL(fsync); CHANGES(int, "fsync", real_fsync(fd), 'S', 0); }
int fdatasync(int fd) { REAL(fdatasync); CHANGES(int, "fsync", real_fdatasync(fd), 'S', 0); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); CHANGES(int, "truncate", real_ftruncate(fd, size), 'T', size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); CHANGES(int, "truncate", real_ftruncate64(fd, size), 'T', size); }

static int truncate_path(const char *path, off_t size) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    int result = ftruncate(fd, size), error = errno;
    close(fd);
    errno = error;
    return result;
}
int truncate(const char *path, off_t size) { return truncate_path(path, size); }
int truncate64(const char *path, off64_t size) { return truncate_path(path, size); }

static int open_file(int folder, const char *name, int flags, mode_t mode) {
    REAL(openat);
    char path[PATH_MAX];
    struct stat before, after;
    if (*boot && !is_inside && name && !strcmp(name, "/proc/sys/kernel/random/boot_id")) name = boot;
    int is_creating = (flags & O_CREAT) && (flags & O_TMPFILE) != O_TMPFILE;
    if (is_inside || !*control || !(is_creating || flags & O_TRUNC) || !find_path(folder, name, path))
        return real_openat(folder, name, flags, mode);
    int existed = !fstatat(folder, name, &before, 0), is_due = 0;
    if (!existed) is_due = reach_path("create", path);
    else if (flags & O_TRUNC) is_due = reach_path("truncate", path);
    int is_locked = lock();
    if (is_locked) existed = !fstatat(folder, name, &before, 0);
    int fd = real_openat(folder, name, flags, mode);
    if (is_locked && fd >= 0 && !fstat(fd, &after)) {
        if (!existed) journal('C', after.st_ino, 0, path, NULL, NULL, 0, 0, after.st_mode);
        else if (flags & O_TRUNC) journal('T', after.st_ino, 0, NULL, NULL, NULL, 0, 0, 0);
    }
    unlock(is_locked);
    if (is_due) die();
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

int open(const char *name, int flags, ...) { MODE(flags); return open_file(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags); return open_file(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags); return open_file(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags); return open_file(folder, name, flags | O_LARGEFILE, mode); }
int creat(const char *name, mode_t mode) { return open_file(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* Names */

#define NAMES(effect, folder, name, call, change) \
    char path[PATH_MAX]; \
    int is_changed = !is_inside && *control && find_path(folder, name, path); \
    int is_due = is_changed && reach_path(effect, path), is_locked = is_changed && lock(); \
    int result = call; \
    if (is_locked && !result) journal(change, inode(path), 0, path, NULL, NULL, 0, 0, 0); \
    unlock(is_locked); \
    if (is_due) die(); \
    return result

static uint64_t inode(const char *path) {
    struct stat status;
    return lstat(path, &status) ? 0 : status.st_ino;
}

int unlink(const char *name) { REAL(unlink); NAMES("unlink", AT_FDCWD, name, real_unlink(name), 'U'); }
int unlinkat(int folder, const char *name, int flags) { REAL(unlinkat); NAMES("unlink", folder, name, real_unlinkat(folder, name, flags), 'U'); }
int rmdir(const char *name) { REAL(rmdir); NAMES("unlink", AT_FDCWD, name, real_rmdir(name), 'U'); }
int mkdir(const char *name, mode_t mode) { REAL(mkdir); NAMES("mkdir", AT_FDCWD, name, real_mkdir(name, mode), 'D'); }
int mkdirat(int folder, const char *name, mode_t mode) { REAL(mkdirat); NAMES("mkdir", folder, name, real_mkdirat(folder, name, mode), 'D'); }

static int rename_file(int folder, const char *name, int target_folder, const char *target, unsigned flags) {
    REAL(renameat2);
    char path[PATH_MAX], target_path[PATH_MAX];
    int is_from = !is_inside && *control && find_path(folder, name, path);
    int is_to = !is_inside && *control && find_path(target_folder, target, target_path);
    int is_due = is_to && reach_path("rename", target_path), is_locked = (is_from || is_to) && lock();
    int result = real_renameat2(folder, name, target_folder, target, flags);
    if (is_locked && !result)
        journal('R', inode(target_path), 0, path, target_path, NULL, 0, 0, is_from && is_to);
    unlock(is_locked);
    if (is_due) die();
    return result;
}
int rename(const char *name, const char *target) { return rename_file(AT_FDCWD, name, AT_FDCWD, target, 0); }
int renameat(int folder, const char *name, int target_folder, const char *target) { return rename_file(folder, name, target_folder, target, 0); }
int renameat2(int folder, const char *name, int target_folder, const char *target, unsigned flags) { return rename_file(folder, name, target_folder, target, flags); }

static int link_file(int folder, const char *name, int target_folder, const char *target, int flags) {
    REAL(linkat);
    char path[PATH_MAX], source[PATH_MAX];
    int is_to = !is_inside && *control && find_path(target_folder, target, path);
    int is_due = is_to && reach_path("link", path), is_locked = is_to && lock();
    int result = real_linkat(folder, name, target_folder, target, flags);
    if (is_locked && !result) { find_path(folder, name, source); journal('L', inode(path), 0, source, path, NULL, 0, 0, 0); }
    unlock(is_locked);
    if (is_due) die();
    return result;
}
int link(const char *name, const char *target) { return link_file(AT_FDCWD, name, AT_FDCWD, target, 0); }
int linkat(int folder, const char *name, int target_folder, const char *target, int flags) { return link_file(folder, name, target_folder, target, flags); }

/* Processes */

int kill(pid_t pid, int number) {
    REAL(kill);
    char object[24];
    snprintf(object, sizeof object, "signal-%d", number);
    int is_due = number && reach("kill", object), result = real_kill(pid, number);
    if (is_due) die();
    return result;
}

int killpg(pid_t group, int number) { return kill(-group, number); }

pid_t fork(void) {
    REAL(fork);
    char place[256] = "-";
    int is_due = reach("fork", "-");
    if (*kind && !is_inside) { is_inside = 1; find_place(place, sizeof place); is_inside = 0; }
    pthread_mutex_lock(&mutex);
    pid_t pid = real_fork();
    pthread_mutex_unlock(&mutex);
    if (!pid) {
        if (!strcmp(kind, "manager")) { if (strstr(place, "lrm/local/runs.py")) strcpy(kind, "runner"); }
        else *kind = 0; /* until it executes a program */
    } else if (is_due) die();
    return pid;
}

pid_t vfork(void) { return fork(); }

/* Return an environment with our variables for a process of koalapy or, while writes are journaled, for all. */
static char **add_variables(char *const argv[], char *const envp[], char **space, char *texts) {
    int is_ours = writes_file >= 0, count = 0;
    if (!*control) return (char **)envp;
    for (int k = 0; argv && argv[k]; k++)
        is_ours = is_ours || strstr(argv[k], "locald.py") || strstr(argv[k], "koalapy.cli.main") || strstr(argv[k], "koalapy/runner/");
    for (int k = 0; envp && envp[k] && count < 4000; k++)
        if (strncmp(envp[k], "LD_PRELOAD=", 11) && strncmp(envp[k], "CRASH_CONTROL=", 14)) space[count++] = envp[k];
    if (is_ours) {
        sprintf(texts, "LD_PRELOAD=%s", library);
        space[count++] = texts;
        char *second = texts + strlen(texts) + 1;
        sprintf(second, "CRASH_CONTROL=%s", control);
        space[count++] = second;
    }
    space[count] = NULL;
    return space;
}
#define VARIABLES char *space[4096], texts[2 * PATH_MAX + 64]; char **ours = add_variables(argv, envp, space, texts)

int execve(const char *path, char *const argv[], char *const envp[]) {
    REAL(execve);
    VARIABLES;
    reach_path("exec", path);
    return real_execve(path, argv, ours);
}
int execv(const char *path, char *const argv[]) { return execve(path, argv, environ); }
int execvpe(const char *file, char *const argv[], char *const envp[]) {
    REAL(execvpe);
    VARIABLES;
    reach_path("exec", file);
    return real_execvpe(file, argv, ours);
}
int execvp(const char *file, char *const argv[]) { return execvpe(file, argv, environ); }

#define SPAWNS(name) \
    REAL(name); \
    VARIABLES; \
    int is_due = reach_path("spawn", path), result = real_##name(pid, path, actions, attributes, argv, ours); \
    if (is_due) die(); \
    return result

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) { SPAWNS(posix_spawn); }
int posix_spawnp(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) { SPAWNS(posix_spawnp); }
