#!/bin/sh
# Runs the netem tests on a kernel that has netem: this host's (as root), else one booted for the
# purpose in user-mode Linux, which needs no root. Exit code: pytest's; 3 when neither can be had.
#
#   tests/netem/run.sh [pytest arguments]      run the netem tests
#   tests/netem/run.sh --exec COMMAND...       run a command on that kernel instead
#
# PYTHON names the interpreter (default .venv/bin/python), NETEM_TIMEOUT_S bounds the run (default 600),
# NETEM_KERNEL=uml skips the host's kernel.
set -u
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
limit_s=${NETEM_TIMEOUT_S:-600}
cd "$root" || exit 1

if [ "${1:-}" = --exec ]; then
    shift
else
    set -- "$python" -m pytest -m netem -p no:cacheprovider tests/harness/links "$@"
fi

host_has_netem() {
    "$python" -c 'from harness.links.probe import probe
raise SystemExit(0 if probe().available("netem") else 1)'
}

if [ "${NETEM_KERNEL:-}" != uml ] && host_has_netem; then
    echo "netem: on this host's kernel $(uname -r)"
    NETEM_REQUIRED=1 exec timeout "$limit_s" "$@"
fi

uml=$(command -v linux.uml) && command -v busybox >/dev/null || {
    echo "netem: this host's kernel offers no netem (it needs root and sch_netem), and user-mode Linux" >&2
    echo "netem: is not installed; \`apt-get install user-mode-linux busybox iproute2\` provides it" >&2
    exit 3
}

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

{
    echo "cd '$root'"
    echo "export NETEM_REQUIRED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 NO_COLOR=1 PY_COLORS=0"
    # Each word quoted for the shell of the other kernel.
    for word in "$@"; do
        printf "'%s' " "$(printf %s "$word" | sed "s/'/'\\\\''/g")"
    done
    echo '</dev/null'
} >"$work/job"

preload=
if grep -q -w amx_tile /proc/cpuinfo; then
    if ! cc -shared -fPIC -O2 -o "$work/xstate.so" "$here/uml/xstate.c"; then
        echo "netem: this processor's AMX state needs a C compiler for $here/uml/xstate.c" >&2
        exit 3
    fi
    preload=$work/xstate.so
fi

echo "netem: in user-mode Linux ($uml), at most $limit_s s"
env ${preload:+LD_PRELOAD="$preload"} timeout "$limit_s" "$uml" mem=1500M \
    root=/dev/root rootfstype=hostfs rootflags=/ ro init="$here/uml/init.sh" \
    netem_work="$work" con=null con0=null,fd:1 quiet loglevel=3 </dev/null 2>&1
ended=$?

if [ ! -s "$work/status" ]; then
    echo "netem: the kernel did not finish the tests (exit $ended; 124 means after $limit_s s)" >&2
    exit 3
fi
exit "$(cat "$work/status")"
