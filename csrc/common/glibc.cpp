// Lets what is built on a newer system run on glibc 2.28, as torch's own wheels do.
//
// Eight symbols would ask for more: exp, exp2, log, log2 and pow got a new version in 2.29, for
// errno's sake alone, libstdc++'s headers read __libc_single_threaded of 2.32 before they count a
// shared_ptr, and the two of a shared_mutex moved into another library in 2.34. setup.py sends the
// functions here by the linker's --wrap; other builds leave them unused.

#include <features.h>
#include <pthread.h>

#if defined(__x86_64__) && defined(__GLIBC__)

__asm__(".symver exp_2_2_5, exp@GLIBC_2.2.5");
__asm__(".symver exp2_2_2_5, exp2@GLIBC_2.2.5");
__asm__(".symver log_2_2_5, log@GLIBC_2.2.5");
__asm__(".symver log2_2_2_5, log2@GLIBC_2.2.5");
__asm__(".symver pow_2_2_5, pow@GLIBC_2.2.5");
__asm__(".symver pthread_rwlock_wrlock_2_2_5, pthread_rwlock_wrlock@GLIBC_2.2.5");
__asm__(".symver pthread_rwlock_unlock_2_2_5, pthread_rwlock_unlock@GLIBC_2.2.5");

#define GLA_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

double exp_2_2_5(double x);
double exp2_2_2_5(double x);
double log_2_2_5(double x);
double log2_2_2_5(double x);
double pow_2_2_5(double x, double y);
int pthread_rwlock_wrlock_2_2_5(pthread_rwlock_t* lock);
int pthread_rwlock_unlock_2_2_5(pthread_rwlock_t* lock);

GLA_HIDDEN double __wrap_exp(double x);
GLA_HIDDEN double __wrap_exp2(double x);
GLA_HIDDEN double __wrap_log(double x);
GLA_HIDDEN double __wrap_log2(double x);
GLA_HIDDEN double __wrap_pow(double x, double y);
GLA_HIDDEN int __wrap_pthread_rwlock_wrlock(pthread_rwlock_t* lock);
GLA_HIDDEN int __wrap_pthread_rwlock_unlock(pthread_rwlock_t* lock);
GLA_HIDDEN extern char __libc_single_threaded;

double __wrap_exp(double x) { return exp_2_2_5(x); }
double __wrap_exp2(double x) { return exp2_2_2_5(x); }
double __wrap_log(double x) { return log_2_2_5(x); }
double __wrap_log2(double x) { return log2_2_2_5(x); }
double __wrap_pow(double x, double y) { return pow_2_2_5(x, y); }
int __wrap_pthread_rwlock_wrlock(pthread_rwlock_t* lock) {
  return pthread_rwlock_wrlock_2_2_5(lock);
}
int __wrap_pthread_rwlock_unlock(pthread_rwlock_t* lock) {
  return pthread_rwlock_unlock_2_2_5(lock);
}

// Never alone: the counts are then always atomic, as they were before 2.32.
char __libc_single_threaded = 0;
}

#endif
