# shellcheck shell=bash
# A Docker engine: the one that runs, else Debian's, started here.

# when this script last started an engine
engine_started="${cache}/engine-started"

engine() {
  if docker info >/dev/null 2>&1; then return; fi
  need docker docker.io iptables
  need dockerd docker.io iptables
  if [[ -d /run/systemd/system ]]; then systemctl start docker; else start_engine; fi
  docker info >/dev/null 2>&1 || fail "no Docker engine answers; see ${cache}/logs/dockerd.log"
}

# A background process may end with the shell that owns it, so every command asks for the engine again. What the
# engine holds (images, containers) outlives it.
start_engine() {
  [[ "$(id -u)" == 0 ]] || fail "no Docker engine runs and only root can start one: start Docker and run this again"
  local options=() log="${cache}/logs/dockerd.log" pid
  # An engine that was stopped hard leaves its pid file behind; a live one's is left alone.
  for pid in /var/run/docker.pid /var/run/docker/containerd/containerd.pid; do
    if [[ -f "${pid}" ]] && ! kill -0 "$(<"${pid}")" 2>/dev/null; then rm -f "${pid}"; fi
  done
  mkdir -p "${log%/*}"
  if ! all_capabilities; then
    # A copy, for the engine and its containers outlive the checkout that started them.
    cp "${here}/runc-granted" "${cache}/runc-granted"
    options+=(--add-runtime "granted=${cache}/runc-granted" --default-runtime granted)
  fi
  date --utc +%FT%TZ >"${engine_started}"
  # With the system's PATH: dockerd would pick up the node's newer containerd shim from the tools folder, and break.
  # Without the lock's descriptor, which would stay locked for as long as the engine runs.
  PATH="${system_path}" setsid nohup dockerd "${options[@]}" >"${log}" 2>&1 </dev/null 9>&- &
  for _ in $(seq 120); do
    if docker info >/dev/null 2>&1; then return; fi
    sleep 0.5
  done
  tail -n 20 "${log}" >&2
}

# Whether this process may pass on every capability the kernel knows. Where one is missing (CAP_SYS_RESOURCE, say),
# runc refuses a privileged container, and `runc-granted` asks it for what is granted instead.
all_capabilities() {
  local bounding last
  bounding="$(awk '/^CapBnd/ {print $2}' /proc/self/status)"
  last="$(</proc/sys/kernel/cap_last_cap)"
  ((16#${bounding} == (1 << (last + 1)) - 1))
}

# Asks the registry alone, so that a missing one costs seconds and a slow pull is not cut short.
registry_has() { timeout 15 docker manifest inspect "$1" >/dev/null 2>&1; }

have_image() { docker image inspect "$1" >/dev/null 2>&1; }
