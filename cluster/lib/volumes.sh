# shellcheck shell=bash
# What pods read and write: PyTorch's packages, data sets and checkpoints, in folders of this machine that both workers
# mount. The restricted profile forbids hostPath volumes in pods but not claims of hostPath *persistent* volumes.

# The folder of the trainer's Python packages. With its CUDA libraries PyTorch weighs 5 GB: mounted, it costs no image load.
torch_name() { sha256sum "${repository}/requirements/trainer.txt" | cut -c1-12; }

torch() {
  local folder
  folder="${shared}/site-packages/$(torch_name)"
  if [[ -f "${folder}/.complete" ]]; then return; fi
  engine
  python_image
  step "installing PyTorch for the pods into ${folder}" "1 to 4 min" fill_torch "${folder}"
}

fill_torch() {
  rm -rf "$1"
  mkdir -p "$1"
  chmod 755 "${shared}" "${shared}/site-packages" "$1"
  site_packages trainer "$1"
  # Pods cannot write what Python compiles; without this every process would compile every module again.
  compile_packages "$1"
  touch "$1/.complete"
}

# site_packages REQUIREMENTS FOLDER: the pinned packages for the images' Python, whatever this machine's is
site_packages() {
  quietly "packages-$1" "${repository}/requirements/uv" pip install --quiet --target "$2" --python-version 3.11 \
    --require-hashes --requirements "${repository}/requirements/$1.txt"
}

# With the images' own Python, as bytecode belongs to one release. A few files are templates that no Python compiles.
compile_packages() {
  docker run --rm --network none --volume "$1:/packages" catj-python:bookworm \
    python3 -m compileall -q -j 0 /packages >/dev/null 2>&1 || true
}

volumes() {
  local namespace="$1" volume
  torch
  mkdir -p "${shared}/checkpoints/${namespace}"
  chmod 777 "${shared}/checkpoints" "${shared}/checkpoints/${namespace}"
  # A volume whose claim was deleted remembers that claim and never binds again.
  for volume in torch data checkpoints; do
    if [[ "$(kubectl get persistentvolume "${namespace}-${volume}" --ignore-not-found --output=jsonpath='{.status.phase}')" =~ ^(Released|Failed)$ ]]; then
      kubectl delete persistentvolume "${namespace}-${volume}" >/dev/null
    fi
  done
  {
    namespace_manifest "${namespace}"
    volume_manifest "${namespace}" torch ReadOnlyMany "site-packages/$(torch_name)"
    volume_manifest "${namespace}" data ReadOnlyMany data
    volume_manifest "${namespace}" checkpoints ReadWriteMany "checkpoints/${namespace}"
  } | kubectl apply --filename=- >/dev/null
  kubectl --namespace "${namespace}" wait --for=jsonpath='{.status.phase}'=Bound --timeout=60s \
    persistentvolumeclaim/torch persistentvolumeclaim/data persistentvolumeclaim/checkpoints >/dev/null
}

forget() {
  local namespace="$1"
  kubectl delete namespace "${namespace}" --ignore-not-found --timeout=120s >/dev/null
  kubectl delete persistentvolume "${namespace}-torch" "${namespace}-data" "${namespace}-checkpoints" --ignore-not-found >/dev/null
  rm -rf "${shared}/checkpoints/${namespace:?}"
}

namespace_manifest() {
  cat <<YAML
apiVersion: v1
kind: Namespace
metadata:
  name: $1
  labels:
    pod-security.kubernetes.io/enforce: restricted
    pod-security.kubernetes.io/warn: restricted
YAML
}

volume_manifest() { # NAMESPACE VOLUME MODE FOLDER
  cat <<YAML
---
apiVersion: v1
kind: PersistentVolume
metadata: {name: "$1-$2"}
spec:
  capacity: {storage: 10Gi}
  accessModes: [$3]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  claimRef: {namespace: "$1", name: "$2"}
  hostPath: {path: "/mnt/catj/$4", type: Directory}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: "$2", namespace: "$1"}
spec:
  accessModes: [$3]
  storageClassName: ""
  volumeName: "$1-$2"
  resources: {requests: {storage: 10Gi}}
YAML
}

# Proves what the tests stand on: a pod of the restricted profile that reads PyTorch from its claim, on both workers.
check() {
  local started="${SECONDS}"
  have_image cost-aware-trainer:dev || fail "the images are missing; run: cluster/cluster images"
  volumes catj-check
  kubectl --namespace catj-check delete job check --ignore-not-found >/dev/null
  sed -e "/@ALL_REDUCE@/{r /dev/stdin" -e "d}" "${here}/check.yaml" < <(sed 's/^/    /' "${here}/all_reduce.py") |
    kubectl --namespace catj-check apply --filename=- >/dev/null
  if kubectl --namespace catj-check wait --for=condition=Complete job/check --timeout=180s >/dev/null; then
    kubectl --namespace catj-check logs --selector=job-name=check --tail=1
    forget catj-check
    say "the cluster works; checked in $((SECONDS - started)) s"
  else
    kubectl --namespace catj-check get pods,events --output=wide >&2
    kubectl --namespace catj-check logs --selector=job-name=check --tail=20 >&2 || true
    fail "the check failed; what it left lies in namespace catj-check"
  fi
}
