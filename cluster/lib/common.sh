# shellcheck shell=bash
# Paths, progress and small helpers that every part uses.

repository="$(cd "${here}/.." && pwd)"
cache="${XDG_CACHE_HOME:-${HOME}/.cache}/cost-aware-training"
state="${XDG_STATE_HOME:-${HOME}/.local/state}/cost-aware-training"
name="${CLUSTER_NAME:-catj}"

# What the nodes mount from this machine. Pods read it as any user, so it lies outside of a home folder where it can.
if [[ "$(id -u)" == 0 ]]; then shared=/var/cache/cost-aware-training; else shared="${cache}/shared"; fi
shared="${CATJ_SHARED_FOLDER:-${shared}}"

say() { printf '%s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 1
}

# step "what happens" "how long it usually takes" COMMAND…: says both, runs it, and says how long it took
step() {
  local what="$1" usual="$2" started="${SECONDS}"
  shift 2
  say "▸ ${what} (usually ${usual})"
  "$@"
  say "  ${what}: done in $((SECONDS - started)) s"
}

# quietly LOG COMMAND…: the output goes to a file, whose end is shown if the command fails
quietly() {
  local log="${cache}/logs/$1.log"
  shift
  mkdir -p "${log%/*}"
  if "$@" >"${log}" 2>&1; then return 0; fi
  say "$* failed; the end of ${log}:"
  tail -n 30 "${log}" >&2
  return 1
}

# content_hash PATH…: names files by what they hold, wherever the repository lies; compiled Python does not count
content_hash() {
  find "$@" -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum |
    sed "s|${repository}/||" | sha256sum | cut -c1-12
}

# need COMMAND PACKAGE…: installs Debian's packages where the command is missing
need() {
  if command -v "$1" >/dev/null; then return; fi
  if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
    fail "$1 is missing and can be installed here only on Debian as root: install ${*:2}"
  fi
  say "  installing ${*:2}"
  quietly apt apt-get update
  DEBIAN_FRONTEND=noninteractive quietly apt apt-get install -y --no-install-recommends "${@:2}"
}

# exclusively COMMAND…: one engine, one cluster: what changes them waits for whoever is changing them already
exclusively() {
  mkdir -p "${state}"
  exec 9>"${state}/lock"
  if ! flock --nonblock 9; then
    say "waiting for another run of this script"
    flock 9
  fi
  "$@"
}
