#!/bin/sh
# install.sh [--uninstall] [--destdir DIR]: copies this folder's programs, pages, units and configuration into /usr/local and
# /etc, or removes what it copied. The programs also run where they lie: bin/rocmforged --models DIR.
# Settings of an administrator stay: files in /etc that were changed are neither replaced nor removed.
set -eu

usage() { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit "$1"; }

here=$(cd "$(dirname "$0")" && pwd)
destdir='' remove=''
while [ $# -gt 0 ]; do
    case $1 in
        --uninstall) remove=yes ;;
        --destdir) [ $# -ge 2 ] || usage 2; destdir=$2; shift ;;
        -h | --help) usage 0 ;;
        *) echo "install.sh: unknown argument $1" >&2; usage 2 ;;
    esac
    shift
done
if [ -z "$destdir" ] && [ "$(id -u)" != 0 ]; then
    echo "install.sh: /usr/local belongs to root: use sudo, or --destdir DIR" >&2
    exit 1
fi
run() { [ -n "$destdir" ] || "$@" || echo "install.sh: failed: $*" >&2; }
systemd() { [ ! -d /run/systemd/system ] || run systemctl "$@"; }

# Each file below bin, lib, share and etc, and its place.
cd "$here"
files=$(find bin lib share etc -type f | LC_ALL=C sort)
place() {
    case $1 in
        etc/*) echo "$destdir/$1" ;;
        *) echo "$destdir/usr/local/$1" ;;
    esac
}
kept() {
    case $1 in
        etc/*) [ -e "$2" ] && ! cmp -s "$1" "$2" ;;
        *) false ;;
    esac
}

if [ -n "$remove" ]; then
    systemd disable --now rocmforge-gateway.socket rocmforge-gateway.service rocmforge-metrics.service
    systemd disable --now rocmforged.socket rocmforged.service
    [ -n "$destdir" ] || rm -f /usr/local/lib/systemd/system/rocmforged.service.d/50-systemd-*.conf
    for file in $files; do
        to=$(place "$file")
        case $file in etc/*) rm -f "$to.new" ;; esac
        if kept "$file" "$to"; then echo "$to is kept: it was changed"; else rm -f "$to"; fi
        # Only folders of this program, and only empty ones.
        folder=$(dirname "$to")
        while case $folder in */rocmforge* | */rocmforge*/*) true ;; *) false ;; esac; do
            rmdir "$folder" 2>/dev/null || break
            folder=$(dirname "$folder")
        done
    done
    [ -n "$destdir" ] || rmdir /usr/local/lib/systemd/system/rocmforged.service.d 2>/dev/null || true
    systemd daemon-reload
    echo "removed; models in /var/lib/rocmforge/models and the users stay"
    exit
fi

for file in $files; do
    to=$(place "$file")
    if kept "$file" "$to"; then
        echo "$to is kept: it was changed; the new one is $to.new"
        to=$to.new
    fi
    mkdir -p "$(dirname "$to")"
    # Beside it first: a running program is replaced, not overwritten.
    cp "$file" "$to.part"
    mode=644
    if [ -x "$file" ]; then mode=755; fi
    chmod "$mode" "$to.part"
    mv -f "$to.part" "$to"
done
run systemd-sysusers rocmforge.conf
run systemd-tmpfiles --create rocmforge.conf
run /usr/local/lib/rocmforge/choose-drop-ins /usr/local/share/rocmforge/drop-ins/version /usr/local/lib/systemd/system
systemd daemon-reload
systemd enable --now rocmforged.socket
echo "installed; adduser NAME rocmforge-users (or usermod -aG) lets NAME connect, then: rocmforge-client list"
