#!/bin/sh
# Run a command, with all that it starts, as on a processor that has AVX2 and FMA but no AVX-512, VNNI or AMX.
#
#   scripts/only_avx2.sh python -m scripts.measure_beside_llamacpp FOLDER
#   scripts/only_avx2.sh make test
#
# Linux can let the instruction CPUID fault (arch_prctl(2), ARCH_SET_CPUID; the flag cpuid_fault in /proc/cpuinfo). A
# preloaded library catches the fault and answers what the processor says, less what is hidden. /proc/cpuinfo is hidden
# in a mount namespace. Clock rates and caches stay those of the processor, and code that does not ask still runs.
# Needs gcc and root, or user namespaces.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/only_avx2.c" <<'C'
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

typedef int sigaction_t(int, const struct sigaction *, struct sigaction *);

static void cpuid_faults(int yes) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, !yes); }

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX], a, b, c, d;
    (void)info;
    if (code[0] != 0x0f || code[1] != 0xa2) { /* another fault comes again, with nobody to catch it */
        struct sigaction usual = {.sa_handler = SIG_DFL};
        ((sigaction_t *)dlsym(RTLD_NEXT, "sigaction"))(number, &usual, NULL);
        return;
    }
    cpuid_faults(0);
    __cpuid_count(leaf, part, a, b, c, d);
    cpuid_faults(1);
    if (leaf == 7 && part == 0) {
        b &= ~0xdc230000u; /* AVX512F, DQ, IFMA, PF, ER, CD, BW, VL */
        c &= ~0x00005842u; /* AVX512_VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ */
        d &= ~0x03c0010cu; /* AVX512_4VNNIW, 4FMAPS, VP2INTERSECT, FP16, AMX_BF16, TILE, INT8 */
    } else if (leaf == 7 && part == 1) {
        a &= ~0x00a00030u; /* AVX_VNNI, AVX512_BF16, AMX_FP16, AVX_IFMA */
        d &= ~0x00080530u; /* AVX_VNNI_INT8, AVX_NE_CONVERT, AMX_COMPLEX, AVX_VNNI_INT16, AVX10 */
    }
    registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

/* Nobody else may catch this signal; tritonserver and Python's faulthandler would. */
int sigaction(int number, const struct sigaction *action, struct sigaction *before) {
    return ((sigaction_t *)dlsym(RTLD_NEXT, "sigaction"))(number, number == SIGSEGV ? NULL : action, before);
}

sighandler_t signal(int number, sighandler_t handler) {
    return number == SIGSEGV ? SIG_DFL : ((sighandler_t (*)(int, sighandler_t))dlsym(RTLD_NEXT, "signal"))(number, handler);
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    ((sigaction_t *)dlsym(RTLD_NEXT, "sigaction"))(SIGSEGV, &action, NULL);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        perror("only_avx2.sh: CPUID cannot be made to fault here");
        _exit(1);
    }
}
C
gcc -O2 -shared -fPIC -Wall -Wextra -o "$folder/only_avx2.so" "$folder/only_avx2.c" -ldl
sed -E '/^flags/ s/ (avx512|avx_|avx10|amx_)[^ ]*//g' /proc/cpuinfo > "$folder/cpuinfo"
unshare --mount $([ "$(id -u)" = 0 ] || echo --map-root-user) sh -c \
    'mount --bind "$0/cpuinfo" /proc/cpuinfo && LD_PRELOAD="$0/only_avx2.so" exec "$@"' "$folder" "$@"
