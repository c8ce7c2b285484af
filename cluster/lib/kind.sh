# shellcheck shell=bash
# The cluster: created, checked, thrown away.

up() {
  engine
  if cluster_is_ready; then return; fi
  image
  tools
  if [[ -n "$(node_containers)" ]]; then
    step "deleting the cluster that an engine stopped hard has left" "5 s" down
  fi
  step "creating three Kubernetes nodes" "40 to 60 s" create_cluster
}

# Nodes whose containers run are given a while to answer: a busy machine is no reason to throw a cluster away. Nodes
# older than the engine were stopped hard with the one before it; the engine may have started them again, and they may
# even call themselves ready for a while, but they do not come back whole.
cluster_is_ready() {
  local created deadline="$((SECONDS + 60))"
  if [[ "$(node_states)" != "3 running" || ! -s "${KUBECONFIG}" ]]; then return 1; fi
  created="$(docker inspect --format '{{.Created}}' "${name}-control-plane")"
  if [[ -f "${engine_started}" && "${created}" < "$(<"${engine_started}")" ]]; then return 1; fi
  while ((SECONDS < deadline)); do
    if [[ "$(ready_nodes)" == 3 ]]; then return 0; fi
    sleep 2
  done
  return 1
}

node_states() {
  docker ps --all --filter "label=io.x-k8s.kind.cluster=${name}" --format '{{.State}}' | sort | uniq -c | xargs
}

ready_nodes() {
  { kubectl --request-timeout=5s get nodes --no-headers 2>/dev/null || true; } | awk '$2 ~ /^Ready/' | wc -l
}

node_containers() { docker ps --all --quiet --filter "label=io.x-k8s.kind.cluster=${name}"; }

create_cluster() {
  mkdir -p "${shared}/site-packages" "${shared}/data" "${shared}/checkpoints" "${state}"
  chmod 755 "${shared}" "${shared}/site-packages" "${shared}/data"
  chmod 777 "${shared}/checkpoints"
  # The cluster's addresses exist inside it alone. A packet sent to one before kube-proxy is ready would otherwise leave
  # this machine.
  if [[ "$(id -u)" == 0 ]]; then
    ip route replace unreachable 10.96.0.0/12
    ip route replace unreachable 10.244.0.0/16
  fi
  sed "s|@SHARED@|${shared}|" "${here}/config.yaml" >"${state}/config.yaml"
  if ! node_is_pulled; then cat "${here}/config-offline.yaml" >>"${state}/config.yaml"; fi
  kind create cluster --name "${name}" --image "$(chosen_node_image)" --config "${state}/config.yaml" \
    --kubeconfig "${KUBECONFIG}" --quiet
  if ! node_is_pulled; then isolate_dns; fi
  kubectl wait --for=condition=Ready nodes --all --timeout=120s >/dev/null
  kubectl --namespace kube-system rollout status deployment/coredns --timeout=120s >/dev/null
}

# Nothing lies outside the cluster to forward a name to (the engine's own resolver would loop): CoreDNS answers for the
# cluster alone.
isolate_dns() {
  kubectl --namespace kube-system create configmap coredns --from-file="${here}/Corefile" --dry-run=client --output=yaml |
    kubectl --namespace kube-system replace --filename=- >/dev/null
  kubectl --namespace kube-system delete pod --selector=k8s-app=kube-dns --wait=false >/dev/null
}

down() {
  engine
  client_tools
  kind delete cluster --name "${name}" --kubeconfig "${KUBECONFIG}" --quiet
}

workers() {
  docker ps --filter "label=io.x-k8s.kind.cluster=${name}" --filter "label=io.x-k8s.kind.role=worker" --format '{{.Names}}' | sort
}

# Copies images into the workers (nothing else is scheduled on the control plane), each only where it is not there yet.
load() {
  local node image import missing imports=()
  engine
  [[ -n "$(workers)" ]] || fail "no cluster runs; run: cluster/cluster up"
  for node in $(workers); do
    missing=()
    for image in "$@"; do
      node_has "${node}" "${image}" || missing+=("${image}")
    done
    if [[ ${#missing[@]} -gt 0 ]]; then
      step "loading ${missing[*]} into ${node}" "5 to 15 s" import_images "${node}" "${missing[@]}" &
      imports+=("$!")
    fi
  done
  for import in "${imports[@]}"; do wait "${import}"; done
}

# Engines name the same image differently, so the node keeps a note of what the engine called what it was given.
node_has() {
  local id
  id="$(docker image inspect --format '{{.Id}}' "$2")"
  docker exec "$1" sh -c "grep -qsx '${id}' '/var/lib/loaded-images/${2//[\/:]/_}' && ctr -n k8s.io images ls -q 2>/dev/null | grep -qE '(^|/)$2\$'"
}

import_images() {
  local node="$1" image
  shift
  docker save "$@" | quietly "load-${node}" docker exec -i "${node}" ctr -n k8s.io images import --digests -
  for image in "$@"; do
    docker image inspect --format '{{.Id}}' "${image}" |
      docker exec -i "${node}" sh -c "mkdir -p /var/lib/loaded-images && cat >'/var/lib/loaded-images/${image//[\/:]/_}'"
  done
}

# Limits one node to so many processors, 0.5 for example, or gives it all of them back.
slow() {
  if [[ $2 == off ]]; then
    docker update --cpu-quota -1 "$1" >/dev/null
  else
    docker update --cpu-period 100000 --cpu-quota "$(awk -v cpus="$2" 'BEGIN { print int(cpus * 100000) }')" "$1" >/dev/null
  fi
}

# Freezes the control plane, API server and all, or lets it go on. Pods go on meanwhile.
control_plane() {
  local state
  state="$(docker inspect --format '{{.State.Paused}}' "${name}-control-plane")"
  case "$1 ${state}" in
    "off false") docker pause "${name}-control-plane" >/dev/null ;;
    "on true") docker unpause "${name}-control-plane" >/dev/null ;;
  esac
}

# shape RATE: what leaves a worker, in both directions between two of them, goes no faster; `shape off` takes it back.
shape() {
  local node
  for node in $(workers); do
    if [[ $1 == off ]]; then
      docker exec "${node}" tc qdisc del dev eth0 root 2>/dev/null || true
    else
      docker exec "${node}" tc qdisc replace dev eth0 root tbf rate "$1" burst 64kb latency 400ms
    fi
  done
}
