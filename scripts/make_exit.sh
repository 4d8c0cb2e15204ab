#!/bin/sh
# make_exit.sh CODE PID [load]: make `make`, whose process is PID, exit with CODE, the exit code of the command it ran.
#
# By itself GNU make exits with 0 or 2. If it can load extensions (feature `load`, GNU make 4) and a C compiler is
# installed, this script compiles an extension that exits make with CODE, and the Makefile loads it next. Otherwise make
# exits with 2 and its last line contains "Error CODE"; an interrupted command then interrupts make as well.
code=$1 make=$2 load=$3
[ "$code" -eq 2 ] && exit 2
if [ -n "$load" ] && mkdir -p build 2>/dev/null &&
    cc -shared -fPIC -x c -o "build/make_exit.$make.so" - 2>/dev/null <<EXTENSION
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
int plugin_is_GPL_compatible; /* make refuses to load an extension without this symbol */
int make_exit_gmk_setup(void) {
    unlink("build/make_exit.$make.so");
    if ($code == 128 + SIGINT) { /* shells distinguish a process killed by SIGINT from one that returned 130 */
        signal(SIGINT, SIG_DFL);
        raise(SIGINT);
    }
    exit($code);
}
EXTENSION
then
    exit 0
fi
# make has to see the signal before the end of this script, or it trips over the missing child and ends with 2
[ "$code" -eq 130 ] && kill -INT "$make" && sleep 1
exit "$code"
