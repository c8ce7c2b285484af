# shellcheck shell=bash
# The image of a Kubernetes node: kind's own where a registry answers, else one built here from Go modules and Debian.

node_image="cost-aware-node:${kubernetes}-$(content_hash "${here}/versions.sh" "${here}/go" "${here}/node" "${here}/node.Dockerfile")"

node_is_pulled() { have_image "${kindest_node}"; }

# the image that `up` gives to kind
chosen_node_image() { if node_is_pulled; then echo "${kindest_node}"; else echo "${node_image}"; fi; }

image() {
  engine
  if have_image "${kindest_node}" || have_image "${node_image}"; then return; fi
  if registry_has "${kindest_node}"; then
    step "pulling ${kindest_node}" "1 to 3 min" docker pull --quiet "${kindest_node}"
    return
  fi
  step "building the cluster's programs from Go modules" "6 to 10 min, once" node_tools
  step "building the node image" "90 s, once" build_node_image
}

build_node_image() {
  need debootstrap debootstrap
  local context components=() tool
  context="$(mktemp -d)"

  say "  [1/4] Debian's base system"
  have_image debian-minimal:bookworm || debian_image debian-minimal:bookworm "${context}/rootfs" \
    systemd,systemd-sysv,iproute2,iptables,nftables,conntrack,ethtool,socat,mount,kmod,procps,ca-certificates,containernetworking-plugins,runc

  say "  [2/4] images of the control plane"
  for tool in kube-apiserver kube-controller-manager kube-scheduler; do
    binary_image "registry.k8s.io/${tool}:${kubernetes}" "${tool}" "${context}"
  done
  binary_image "${etcd_image}" etcd "${context}"
  binary_image "${coredns_image}" coredns "${context}"
  binary_image "${pause_image}" pause "${context}"
  mkdir "${context}/proxy"
  cp "${bin}"/{kube-proxy,kubectl} "${here}/node/usr/local/bin/pod-network" "${context}/proxy/"
  printf 'FROM debian-minimal:bookworm\nCOPY . /usr/local/bin/\n' >"${context}/proxy/Dockerfile"
  quietly image-kube-proxy docker build -t "registry.k8s.io/kube-proxy:${kubernetes}" "${context}/proxy"
  components+=("${etcd_image}" "${coredns_image}" "${pause_image}")
  for tool in kube-apiserver kube-controller-manager kube-scheduler kube-proxy; do
    components+=("registry.k8s.io/${tool}:${kubernetes}")
  done

  say "  [3/4] the node"
  cp -r "${here}/node" "${context}/node"
  echo "${kubernetes}" >"${context}/node/kind/version"
  sed -i "s/@KUBERNETES@/${kubernetes}/" "${context}/node/kind/manifests/default-cni.yaml"
  mkdir -p "${context}/node/usr/local/bin"
  cp "${bin}"/{containerd,ctr,containerd-shim-runc-v2,kubelet,kubeadm,kubectl} "${context}/node/usr/local/bin/"
  cp "${here}/node.Dockerfile" "${context}/Dockerfile"
  rm -rf "${context}/proxy"
  quietly image-node docker build -t cost-aware-node:bare "${context}"
  rm -rf "${context}"

  say "  [4/4] the control plane's images, into the node's own store"
  preload "${components[@]}"
}

# A cluster then starts without importing anything.
preload() {
  docker rm -f cost-aware-node-preload >/dev/null 2>&1 || true
  docker run -d --name cost-aware-node-preload --privileged --entrypoint /usr/local/bin/containerd cost-aware-node:bare >/dev/null
  local _
  for _ in $(seq 100); do
    if docker exec cost-aware-node-preload ctr version >/dev/null 2>&1; then break; fi
    sleep 0.3
  done
  docker save "$@" | quietly image-preload docker exec -i cost-aware-node-preload ctr -n k8s.io images import --digests -
  docker stop cost-aware-node-preload >/dev/null
  docker commit --change 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]' cost-aware-node-preload "${node_image}" >/dev/null
  docker rm cost-aware-node-preload >/dev/null
  docker rmi "$@" cost-aware-node:bare >/dev/null 2>&1 || true
}

debian_image() { # TAG FOLDER PACKAGES: Debian without caches, manuals and translations
  quietly debootstrap debootstrap --variant=minbase --include="$3" bookworm "$2"
  rm -rf "$2"/var/cache/apt/* "$2"/var/lib/apt/lists/* "$2"/usr/share/{doc,man,info,locale,lintian} "$2"/var/log/*
  tar -C "$2" -c . | docker import --change 'CMD ["bash"]' - "$1" >/dev/null
  rm -rf "$2"
}

binary_image() { # TAG TOOL FOLDER: one static binary and nothing else
  mkdir "$3/$2"
  cp "${bin}/$2" "$3/$2/"
  printf 'FROM scratch\nCOPY %s /usr/local/bin/\nENV PATH=/usr/local/bin\nENTRYPOINT ["/usr/local/bin/%s"]\n' "$2" "$2" >"$3/$2/Dockerfile"
  quietly "image-$2" docker build -t "$1" "$3/$2"
  rm -rf "${3:?}/$2"
}
