#!/bin/sh
# make_exit.sh CODE PID [load]: let `make`, whose process is PID, end with CODE, the exit code of the command it ran.
#
# GNU make itself ends with 0 or 2. Where it can load extensions (its feature `load`, GNU make 4) and a C compiler is
# installed, this compiles an extension that ends make with CODE, and the Makefile loads it next. Elsewhere make ends
# with 2 and its last line says "Error CODE"; an interrupted command interrupts make there as well.
code=$1 make=$2 load=$3
[ "$code" -eq 2 ] && exit 2
if [ -n "$load" ] && mkdir -p build 2>/dev/null &&
    cc -shared -fPIC -x c -o "build/make_exit.$make.so" - 2>/dev/null <<EXTENSION
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
int plugin_is_GPL_compatible; /* make loads nothing without this name */
int make_exit_gmk_setup(void) {
    unlink("build/make_exit.$make.so");
    if ($code == 128 + SIGINT) { /* shells tell a process that SIGINT ended from one that returned 130 */
        signal(SIGINT, SIG_DFL);
        raise(SIGINT);
    }
    exit($code);
}
EXTENSION
then
    exit 0
fi
[ "$code" -eq 130 ] && kill -INT "$make"
exit "$code"
