/* A client of NFS, as a library for LD_PRELOAD: what a process sees of one folder is late.
 *
 * The process is one client. Below the folder $NFS_FOLDER, for $NFS_MILLISECONDS:
 * - stat answers what was true when it last asked, also that there was no such file;
 * - a listing of a folder lacks what others have made, and has what they have removed.
 * Like Linux's client it asks anew after it opened the file, and after it changed the folder itself.
 * Every $NFS_LOST'th exclusive creation makes the file and answers EEXIST, as if the first reply
 * was lost and the call repeated. This client's clock is $NFS_SKEW seconds late; times of files are
 * the server's. x86-64 and aarch64, glibc 2.33 or later.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) \
  ({ \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    real; \
  })

struct answer {
  char path[PATH_MAX];
  struct stat state;
  int error;
  double until;
  struct answer *next;
};
struct listing {
  char path[PATH_MAX];
  double until;
  struct dirent *entries;
  int count;
  struct listing *next;
};
struct reader {
  DIR *folder;
  struct dirent *entries;
  int count, position;
  struct reader *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct answer *answers;
static struct listing *listings;
static struct reader *readers;
static int creations;

static double number(const char *name) {
  const char *text = getenv(name);
  return text ? atof(text) : 0;
}

static double now(void) {
  struct timespec time;
  REAL(clock_gettime)(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec / 1e9;
}

static int is_below(const char *path, const char *folder) {
  size_t length = strlen(folder);
  return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int is_remote(const char *path) {
  const char *folder = getenv("NFS_FOLDER");
  return folder && path && strlen(path) < PATH_MAX && is_below(path, folder);
}

/* Forget a file, and if this client has changed its folder, all that the folder holds. */
static void forget(const char *path, int changed) {
  char parent[PATH_MAX];
  snprintf(parent, sizeof parent, "%s", path);
  char *slash = strrchr(parent, '/');
  if (slash) *slash = 0;
  size_t length = strlen(parent);
  pthread_mutex_lock(&mutex);
  for (struct answer *a = answers; a; a = a->next) {
    int sibling = !strncmp(a->path, parent, length) && a->path[length] == '/' &&
                  !strchr(a->path + length + 1, '/');
    if (!strcmp(a->path, path) || (changed && (sibling || is_below(a->path, path)))) a->until = 0;
  }
  for (struct listing *l = listings; changed && l; l = l->next)
    if (!strcmp(l->path, parent) || is_below(l->path, path)) l->until = 0;
  pthread_mutex_unlock(&mutex);
}

static int ask(const char *path, struct stat *state) {
  struct answer *a;
  pthread_mutex_lock(&mutex);
  for (a = answers; a && strcmp(a->path, path); a = a->next);
  if (!a) {
    a = calloc(1, sizeof *a);
    strcpy(a->path, path);
    a->next = answers;
    answers = a;
  }
  if (a->until < now()) {
    a->error = REAL(stat)(path, &a->state) ? errno : 0;
    a->until = now() + number("NFS_MILLISECONDS") / 1e3;
  }
  int error = a->error;
  *state = a->state;
  pthread_mutex_unlock(&mutex);
  errno = error ? error : errno;
  return error ? -1 : 0;
}

#define STAT(name) \
  int name(const char *restrict path, struct stat *restrict state) { \
    return is_remote(path) ? ask(path, state) : REAL(name)(path, state); \
  }
STAT(stat)
STAT(lstat)
int stat64(const char *restrict path, struct stat64 *restrict state) {
  return stat(path, (struct stat *)state);
}
int lstat64(const char *restrict path, struct stat64 *restrict state) {
  return lstat(path, (struct stat *)state);
}
int fstatat(int at, const char *restrict path, struct stat *restrict state, int flags) {
  return is_remote(path) ? ask(path, state) : REAL(fstatat)(at, path, state, flags);
}
int fstatat64(int at, const char *restrict path, struct stat64 *restrict state, int flags) {
  return fstatat(at, path, (struct stat *)state, flags);
}

int open64(const char *path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(list, mode_t) : 0;
  va_end(list);
  /* The way to the server. */
  if (is_remote(path) && flags & O_CREAT) usleep(10000);
  int file = REAL(open64)(path, flags, mode);
  if (!is_remote(path)) return file;
  int error = errno;
  forget(path, file >= 0 && flags & O_CREAT);
  if (file >= 0 && (flags & O_EXCL) && number("NFS_LOST") &&
      !(__sync_add_and_fetch(&creations, 1) % (int)number("NFS_LOST"))) {
    REAL(close)(file);
    file = -1;
    error = EEXIST;
  }
  errno = error;
  return file;
}

#define CHANGE(name, parameters, path, ...) \
  int name parameters { \
    int result = REAL(name)(__VA_ARGS__), error = errno; \
    if (is_remote(path)) forget(path, !result); \
    errno = error; \
    return result; \
  }
CHANGE(mkdir, (const char *path, mode_t mode), path, path, mode)
CHANGE(rmdir, (const char *path), path, path)
CHANGE(unlink, (const char *path), path, path)
CHANGE(rename, (const char *from, const char *to), to, from, to)
CHANGE(utimensat, (int at, const char *path, const struct timespec times[2], int flags), path, at,
       path, times, flags)

DIR *opendir(const char *path) {
  DIR *folder = REAL(opendir)(path);
  if (!folder || !is_remote(path)) return folder;
  struct listing *l;
  pthread_mutex_lock(&mutex);
  for (l = listings; l && strcmp(l->path, path); l = l->next);
  if (!l) {
    l = calloc(1, sizeof *l);
    strcpy(l->path, path);
    l->next = listings;
    listings = l;
  }
  if (l->until < now()) {
    /* Readers of the old entries keep them; a test is short. */
    l->entries = 0;
    l->count = 0;
    for (struct dirent *entry; (entry = REAL(readdir)(folder));) {
      l->entries = l->count % 64 ? l->entries : memcpy(calloc(l->count + 64, sizeof *entry),
                                                       l->entries ? l->entries : entry,
                                                       l->count * sizeof *entry);
      memcpy(l->entries + l->count++, entry, entry->d_reclen);
    }
    l->until = now() + number("NFS_MILLISECONDS") / 1e3;
  }
  struct reader *r = calloc(1, sizeof *r);
  *r = (struct reader){folder, l->entries, l->count, 0, readers};
  readers = r;
  pthread_mutex_unlock(&mutex);
  return folder;
}

struct dirent *readdir(DIR *folder) {
  struct reader *r;
  pthread_mutex_lock(&mutex);
  for (r = readers; r && r->folder != folder; r = r->next);
  pthread_mutex_unlock(&mutex);
  if (!r) return REAL(readdir)(folder);
  return r->position < r->count ? &r->entries[r->position++] : 0;
}
struct dirent64 *readdir64(DIR *folder) { return (struct dirent64 *)readdir(folder); }

int closedir(DIR *folder) {
  pthread_mutex_lock(&mutex);
  for (struct reader **r = &readers; *r; r = &(*r)->next)
    if ((*r)->folder == folder) {
      *r = (*r)->next;
      break;
    }
  pthread_mutex_unlock(&mutex);
  return REAL(closedir)(folder);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  int result = REAL(clock_gettime)(clock, time);
  if (clock == CLOCK_REALTIME) time->tv_sec -= (long)number("NFS_SKEW");
  return result;
}
