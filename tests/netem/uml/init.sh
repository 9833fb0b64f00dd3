#!/bin/sh
# Process 1 of the user-mode Linux that tests/netem/run.sh boots. The host's files are the root, read-only;
# the working directory named on the kernel command line is writable and holds `job`, a shell script.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
for word in $(cat /proc/cmdline); do
    case $word in netem_work=*) work=${word#netem_work=} ;; esac
done
# Nothing is mounted over /tmp: the checkout may be there.
mkdir -p /run/work /run/tmp /run/netns
mount -t hostfs none /run/work -o "$work"
mount -t tmpfs tmpfs /dev/shm 2>/dev/null
export TMPDIR=/run/tmp HOME=/run/tmp

modules=/usr/lib/uml/modules/$(uname -r)/kernel
for module in drivers/net/veth drivers/net/tun net/sched/sch_netem net/sched/sch_tbf \
    net/sched/sch_htb net/sched/sch_fq net/ipv4/tcp_bbr; do
    busybox insmod "$modules/$module.ko" || echo "netem: no module $module" >&2
done
ip link set lo up

sh /run/work/job
echo $? >/run/work/status
sync
busybox poweroff -f
