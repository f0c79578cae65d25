# What the launch scripts share: a process with a log, a wait until it serves, and an end of all.
# A script that sources this file leaves no process behind, unless SIGKILL ends the script itself:
# then the processes that it has named are to be ended by hand, each with its group: kill -- -PID.

LOGS=${LOGS:-logs}                  # a log for each process
START_S=${START_S:-1800}            # a large model takes minutes to load
STOP_S=${STOP_S:-30}                # then processes that have not ended are killed
SIGNALS=(HUP INT QUIT PIPE ALRM TERM USR1 USR2)
names=() pids=()
starting='' ended=''                # ended: the exit status that a signal has asked for
mkdir -p "$LOGS"

start() { # start NAME COMMAND...
  local name=$1
  shift
  starting=1 # A signal waits until the process is noted.
  set -m     # In a process group of its own, so that its children can be ended, too.
  "$@" </dev/null >"$LOGS/$name.log" 2>&1 &
  set +m
  names+=("$name") pids+=($!)
  starting=''
  [[ -z $ended ]] || exit "$ended"
  echo "$name: pid $!, log $LOGS/$name.log"
}

all_run() { # end the script if one of its processes has ended
  for i in "${!pids[@]}"; do
    kill -0 "${pids[i]}" 2>/dev/null && continue
    echo "${names[i]} has ended; the end of $LOGS/${names[i]}.log:" >&2
    tail -n 20 "$LOGS/${names[i]}.log" >&2
    exit 1
  done
}

serving() { # serving PORT...: wait until a server answers on each of them
  local port deadline=$((SECONDS + START_S))
  for port in "$@"; do
    until curl --silent --fail --max-time 2 --output /dev/null "http://127.0.0.1:$port/health"; do
      all_run
      ((SECONDS < deadline)) || { echo "nothing serves on port $port" >&2; exit 1; }
      sleep 1
    done
  done
}

stay() { # stay PORT: until Ctrl-C, SIGTERM, or the end of one of the processes
  echo "serving on http://127.0.0.1:$1; Ctrl-C stops"
  wait -n "${pids[@]}" || true
  all_run
}

stop() {
  trap '' "${SIGNALS[@]}" # A terminal that closes sends HUP, also to a script that ends.
  kill "${pids[@]}" 2>/dev/null || true
  for ((tenths = 0; tenths < 10 * STOP_S; tenths++)); do
    kill -0 "${pids[@]}" 2>/dev/null || break
    sleep 0.1
  done
  for pid in "${pids[@]}"; do
    kill -KILL -- "-$pid" 2>/dev/null || true
  done
  pids=()
}

on_signal() { # on_signal STATUS: stop and exit, at once or at the end of `start`
  ended=$1
  [[ -n $starting ]] && return
  stop # Not by the trap of EXIT alone: the signal may have come when that had just begun.
  exit "$1"
}

trap stop EXIT
for signal in "${SIGNALS[@]}"; do
  trap "on_signal $((128 + $(kill -l "$signal")))" "$signal"
done
