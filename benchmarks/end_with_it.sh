# Sourced by scripts that launch others, whose process numbers they keep in `running`. What runs then ends with the script, which may run
# under a timeout of its caller's. A part that a script runs beside itself calls `end_with_it` too, since a subshell takes over no traps.
# shellcheck shell=sh
running=
end_with_it() { # a shell hears of signals only while it waits
  trap 'trap "" TERM INT HUP; kill $running 2>/dev/null; wait; exit 143' TERM INT HUP
}
end_with_it
