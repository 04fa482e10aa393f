/* A call hands out the parts 0 .. parts - 1 of a task. Results depend on the number of parts, not on who does them.

   Where PyTorch has threads of OpenMP, these do them: others would have to share the processors with them, which wait for
   work without sleeping. Otherwise, and in the child of a fork, where there are none left, threads of our own, which are
   started when they are needed. Whoever finds these busy does all parts alone. */

#include <pthread.h>
#include <sys/mman.h>
#define TOO_LARGE 0x7fu /* of 8 bits, which nothing here has */
#include "pointwise.h"

typedef int (*task_t)(void **, const int64_t *, const double *, int64_t part, int64_t parts);

struct work {
    task_t task;
    void **pointers;
    const int64_t *numbers;
    const double *reals;
    int64_t parts;
};

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER; /* one call at a time has the pool */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static struct work work;
static uint64_t turn;
static int64_t threads, unfinished;
static int failed; /* whether any part of the work had no memory */

static void *wait_for_work(void *argument) {
    int64_t me = (int64_t)(intptr_t)argument;
    pthread_mutex_lock(&lock);
    uint64_t seen = turn - 1; /* whoever starts a thread has work for it */
    for (;;) {
        while (turn == seen) pthread_cond_wait(&begun, &lock);
        seen = turn;
        if (me < work.parts) {
            struct work mine = work;
            pthread_mutex_unlock(&lock);
            int has_failed = mine.task(mine.pointers, mine.numbers, mine.reals, me, mine.parts);
            pthread_mutex_lock(&lock);
            failed |= has_failed;
            if (--unfinished == 0) pthread_cond_signal(&done);
        }
    }
    return NULL;
}

static void forget_threads(void) {
    pthread_mutex_init(&owner, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&begun, NULL);
    pthread_cond_init(&done, NULL);
    threads = unfinished = 0;
}

static int start_threads(int64_t wanted) {
    static int is_registered;
    if (!is_registered) is_registered = pthread_atfork(NULL, NULL, forget_threads) == 0;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (threads < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, wait_for_work, (void *)(intptr_t)(threads + 1))) break;
        threads++;
    }
    pthread_attr_destroy(&detached);
    return threads >= wanted;
}

typedef void (*parallel_t)(void (*)(void *), void *, unsigned, unsigned);

static parallel_t parallel; /* GOMP_parallel of the library that PyTorch uses */

struct shared {
    struct work work;
    int64_t next;
    int failed;
};

static void do_parts(void *argument) {
    struct shared *shared = argument;
    struct work mine = shared->work;
    for (;;) {
        int64_t part = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED);
        if (part >= mine.parts) return;
        if (mine.task(mine.pointers, mine.numbers, mine.reals, part, mine.parts)) {
            __atomic_store_n(&shared->failed, 1, __ATOMIC_RELAXED);
        }
    }
}

static void forget_all(void) {
    parallel = NULL;
    forget_threads();
}

void use(void *function) {
    static int is_registered;
    if (!is_registered) is_registered = pthread_atfork(NULL, NULL, forget_all) == 0;
    if (is_registered) parallel = (parallel_t)function;
}

/* Returns whether there was no memory for what a part has to keep. */
int run(task_t task, void **pointers, const int64_t *numbers, const double *reals, int64_t parts) {
    if (parts > 1 && parallel) {
        struct shared shared = {{task, pointers, numbers, reals, parts}, 0, 0};
        parallel(do_parts, &shared, (unsigned)parts, 0);
        return shared.failed;
    }
    int has_failed = 0;
    if (parts > 1 && pthread_mutex_trylock(&owner) == 0) {
        pthread_mutex_lock(&lock);
        work = (struct work){task, pointers, numbers, reals, parts};
        turn++;
        failed = 0;
        unfinished = parts - 1;
        int is_shared = start_threads(parts - 1);
        if (is_shared) {
            pthread_cond_broadcast(&begun);
            pthread_mutex_unlock(&lock);
            has_failed = task(pointers, numbers, reals, 0, parts);
            pthread_mutex_lock(&lock);
            while (unfinished > 0) pthread_cond_wait(&done, &lock);
            has_failed |= failed;
        } else {
            work.parts = 0; /* the threads that there are find nothing to do */
        }
        pthread_mutex_unlock(&lock);
        pthread_mutex_unlock(&owner);
        if (is_shared) return has_failed;
    }
    for (int64_t part = 0; part < parts; part++) has_failed |= task(pointers, numbers, reals, part, parts);
    return has_failed;
}

#ifdef MADV_HUGEPAGE
#define HUGE_PAGE ((uintptr_t)1 << 21)

/* The first access to each huge page of a part, which leaves what is there. */
static int touch(void **pointers, const int64_t *numbers, const double *reals, int64_t part, int64_t parts) {
    uintptr_t start = (uintptr_t)pointers[0], end = start + (uintptr_t)numbers[0];
    uintptr_t first = (start + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    int64_t pages = end > first ? (int64_t)((end - first + HUGE_PAGE - 1) / HUGE_PAGE) : 0;
    (void)reals;
    for (int64_t page = pages * part / parts; page < pages * (part + 1) / parts; page++) {
        __atomic_fetch_or((unsigned char *)(first + (uintptr_t)page * HUGE_PAGE), 0, __ATOMIC_RELAXED);
    }
    return 0;
}
#endif

/* Fresh memory comes in huge pages where the system allows it: most of the time of a large output are its page faults.
   Where threads will write here and there, `parts` of them first share the pages: two that meet at the same fresh one would
   both fill it with zeros. */
void ask_for_huge_pages(void *start, int64_t bytes, int64_t parts) {
    uintptr_t first = ((uintptr_t)start + 4095) & ~(uintptr_t)4095;
    uintptr_t last = ((uintptr_t)start + (uintptr_t)bytes) & ~(uintptr_t)4095;
#ifdef MADV_HUGEPAGE
    int is_granted = last > first && madvise((void *)first, last - first, MADV_HUGEPAGE) == 0;
    if (is_granted && parts > 1) run(touch, &start, &bytes, NULL, parts);
#endif
}

/* Sums over the height of partial sums (height, width), in their order. */
#define SETTLE(T, store) \
    for (int64_t j = 0; j < width; j++) { \
        double total = 0; \
        for (int64_t i = 0; i < height; i++) total += partials[i * width + j]; \
        ((T *)totals)[j] = store; \
    }

void settle_one(const double *partials, int64_t height, int64_t width, int64_t kind, void *totals) {
    switch (kind) {
        case 0: SETTLE(float, (float)total) break;
        case 1: SETTLE(double, total) break;
        case 2: SETTLE(uint16_t, store_bf16((float)total)) break;
        default: SETTLE(uint16_t, store_fp16((float)total))
    }
}

/* Tasks for some of them, by how many there are, their height, and the width and kind of each. */
int clear(void **pointers, const int64_t *numbers, const double *reals, int64_t part, int64_t parts) {
    (void)reals, (void)part, (void)parts;
    for (int64_t k = 0; k < numbers[0]; k++)
        memset(pointers[k], 0, (size_t)(numbers[1] * numbers[2 * k + 2]) * sizeof(double));
    return 0;
}

int settle(void **pointers, const int64_t *numbers, const double *reals, int64_t part, int64_t parts) {
    (void)reals, (void)part, (void)parts;
    for (int64_t k = 0; k < numbers[0]; k++)
        settle_one(pointers[2 * k], numbers[1], numbers[2 * k + 2], numbers[2 * k + 3], pointers[2 * k + 1]);
    return 0;
}
