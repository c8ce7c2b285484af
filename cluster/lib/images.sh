# shellcheck shell=bash
# The project's images. Each carries a hash of what it was made from, and is made again only when that changed.

content_label=dev.costaware.content

# The Python below every image: python:3.11-slim where a registry answers, else Debian's own.
python_image() {
  if have_image catj-python:bookworm; then return; fi
  if registry_has "${python_slim}"; then
    step "pulling ${python_slim}" "20 s" docker pull --quiet "${python_slim}"
    docker tag "${python_slim}" catj-python:bookworm
    return
  fi
  need debootstrap debootstrap
  local context
  context="$(mktemp -d)"
  step "building the Python base image from Debian" "40 s, once" \
    debian_image catj-python:bookworm "${context}/rootfs" python3,python-is-python3,ca-certificates
  rm -rf "${context}"
}

images() {
  engine
  python_image
  operator_image
  trainer_stub_image
  load cost-aware-operator:dev cost-aware-trainer:dev
}

operator_image() {
  local source="${repository}/operator/src" contract="${repository}/trainer_image/src/cost_aware_trainer"
  local inputs=("${repository}/operator/Dockerfile" "${repository}/requirements/operator.txt" "${source}"
    "${contract}/__init__.py" "${contract}/contract")
  if is_current cost-aware-operator:dev "${inputs[@]}"; then return; fi
  step "building cost-aware-operator:dev" "15 s" build_operator_image "${inputs[@]}"
}

build_operator_image() {
  local context
  context="$(mktemp -d)"
  packages_layer operator "${context}/site-packages"
  copy_sources "${repository}/operator/src" "${context}/src"
  copy_sources "${repository}/trainer_image/src/cost_aware_trainer/contract" "${context}/src/cost_aware_trainer/contract"
  cp -p "${repository}/trainer_image/src/cost_aware_trainer/__init__.py" "${context}/src/cost_aware_trainer/"
  build cost-aware-operator:dev "${repository}/operator/Dockerfile" "${context}" "$@"
}

# The cluster's trainer: our source alone. PyTorch comes from the claim `torch`, mounted at /opt/torch.
trainer_stub_image() {
  local inputs=("${here}/trainer.Dockerfile" "${repository}/trainer_image/src")
  if is_current cost-aware-trainer:dev "${inputs[@]}"; then return; fi
  step "building cost-aware-trainer:dev" "5 s" build_trainer_stub_image "${inputs[@]}"
}

build_trainer_stub_image() {
  local context
  context="$(mktemp -d)"
  copy_sources "${repository}/trainer_image/src" "${context}/src"
  build cost-aware-trainer:dev "${here}/trainer.Dockerfile" "${context}" "$@"
}

# The image as users run it, with PyTorch and its CUDA libraries in it.
trainer_image() {
  engine
  python_image
  torch
  local inputs=("${repository}/trainer_image/Dockerfile" "${repository}/requirements/trainer.txt" "${repository}/trainer_image/src")
  if ! is_current cost-aware-trainer:full "${inputs[@]}"; then
    step "building cost-aware-trainer:full with PyTorch in it" "3 to 5 min" build_trainer_image "${inputs[@]}"
  fi
  step "two ranks all-reduce in cost-aware-trainer:full" "15 s" smoke_test_trainer_image
}

build_trainer_image() {
  local context
  # beside the packages, so that the context is made of hard links
  context="$(mktemp -d "${shared}/build.XXXXXX")"
  cp -al "${shared}/site-packages/$(torch_name)" "${context}/site-packages"
  rm "${context}/site-packages/.complete"
  copy_sources "${repository}/trainer_image/src" "${context}/src"
  build cost-aware-trainer:full "${repository}/trainer_image/Dockerfile" "${context}" "$@"
}

# Without privileges, network or a writable file system but for scratch space: what the restricted profile leaves.
# A container without a network has no name for itself, so the ranks are told their address.
smoke_test_trainer_image() {
  timeout 120 docker run --rm --network none --user 65532:65532 --cap-drop ALL --security-opt no-new-privileges --read-only \
    --tmpfs /tmp:mode=1777 --tmpfs /run:mode=1777 --env HOME=/tmp --env OMP_NUM_THREADS=1 \
    --env GLOO_SOCKET_IFNAME=lo --volume "${here}/all_reduce.py:/all_reduce.py:ro" --entrypoint python3 cost-aware-trainer:full \
    -m torch.distributed.run --nnodes 1 --nproc-per-node 2 --local-addr 127.0.0.1 --rdzv-backend c10d \
    --rdzv-endpoint 127.0.0.1:29400 --rdzv-conf is_host=1 /all_reduce.py 2>&1 | grep '^rank'
}

is_current() { # TAG INPUT…
  [[ "$(docker image inspect --format "{{index .Config.Labels \"${content_label}\"}}" "$1" 2>/dev/null)" == "$(made_from "${@:2}")" ]]
}

made_from() { echo "$(docker image inspect --format '{{.Id}}' catj-python:bookworm | tail -c 13)-$(content_hash "$@")"; }

build() { # TAG DOCKERFILE CONTEXT INPUT…
  cp "$2" "$3/Dockerfile"
  quietly "image-${1//[\/:]/-}" docker build --tag "$1" --build-arg BASE_IMAGE=catj-python:bookworm \
    --label "${content_label}=$(made_from "${@:4}")" "$3"
  rm -rf "$3"
}

copy_sources() { # FROM TO: without what Python compiled
  mkdir -p "$2"
  tar -C "$1" --exclude=__pycache__ --exclude='*.egg-info' -c . | tar -C "$2" -x
}

# packages_layer NAME FOLDER: the pinned packages, kept between builds, as hard links
packages_layer() {
  local kept
  kept="${cache}/packages-$1-$(content_hash "${repository}/requirements/$1.txt")"
  if [[ ! -f "${kept}/.complete" ]]; then
    rm -rf "${kept}"
    mkdir -p "${kept}"
    site_packages "$1" "${kept}"
    compile_packages "${kept}"
    touch "${kept}/.complete"
  fi
  mkdir -p "${2%/*}"
  cp -al "${kept}" "$2" 2>/dev/null || cp -a "${kept}" "$2"
  rm "$2/.complete"
}
