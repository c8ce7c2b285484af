# shellcheck shell=bash
# The cluster's programs, from Go modules. Whatever is built lies in one folder named after its recipe.

bin="${cache}/bin-$(content_hash "${here}/versions.sh" "${here}/go")"
system_path="${PATH//"${bin}:"/}"
export PATH="${bin}:${system_path}"

# kind, kubectl and helm, each only where PATH has none
client_tools() {
  local tool
  for tool in kind kubectl helm; do
    command -v "${tool}" >/dev/null || build_tool "${tool}"
  done
}

# everything that a node is made of, and the clients that fit it
node_tools() {
  local all=(kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubeadm kubectl
    etcd coredns pause containerd ctr containerd-shim-runc-v2 kind helm)
  local tool number=0
  for tool in "${all[@]}"; do
    number=$((number + 1))
    [[ -x "${bin}/${tool}" ]] || say "  [${number}/${#all[@]}] ${tool}"
    build_tool "${tool}"
  done
}

tools() {
  if node_is_pulled; then client_tools; else node_tools; fi
}

build_tool() {
  if [[ -x "${bin}/$1" ]]; then return; fi
  command -v go >/dev/null || fail "Go 1.26 is needed to build $1"
  mkdir -p "${bin}"
  local version="k8s.io/component-base/version"
  local minor="${kubernetes#v1.}"
  local stamp="-X ${version}.gitVersion=${kubernetes} -X ${version}.gitMajor=1 -X ${version}.gitMinor=${minor%%.*}"
  case "$1" in
    kube*) go_build kubernetes "$1" "k8s.io/kubernetes/cmd/$1" "${stamp}" ;;
    etcd) go_build etcd "$1" go.etcd.io/etcd/server/v3 ;;
    coredns | pause) go_build "$1" "$1" . ;;
    containerd | ctr | containerd-shim-runc-v2) go_install "github.com/containerd/containerd/v2/cmd/$1@${containerd}" ;;
    kind) go_install "sigs.k8s.io/kind@${kind}" ;;
    helm) go_install "helm.sh/helm/v4/cmd/helm@${helm}" ;;
    *) fail "no recipe for $1" ;;
  esac
}

# A binary appears under its name only when it is whole.
go_build() { # MODULE TOOL PACKAGE [STAMP]
  CGO_ENABLED=0 GOFLAGS=-trimpath quietly "go-$2" \
    go -C "${here}/go/$1" build -ldflags "-s -w ${4:-}" -o "${bin}/.$2" "$3"
  mv "${bin}/.$2" "${bin}/$2"
}

go_install() { # PACKAGE@VERSION
  local tool="${1%@*}"
  CGO_ENABLED=0 GOFLAGS=-trimpath GOBIN="${bin}" quietly "go-${tool##*/}" \
    go install -tags "no_btrfs no_devmapper no_zfs" -ldflags "-s -w" "$1"
}
