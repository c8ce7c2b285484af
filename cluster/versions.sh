# shellcheck shell=bash disable=SC2034  # read by the other scripts
# What the cluster is made of. The folder of built tools and the node image are named after a hash of this file and go/,
# so a changed line builds anew and an unchanged one never does.

kubernetes=v1.36.3
kind=v0.33.0
helm=v4.3.1
containerd=v2.4.2

# The image names that kubeadm of this Kubernetes release asks the node for.
etcd_image=registry.k8s.io/etcd:3.6.8-0
coredns_image=registry.k8s.io/coredns/coredns:v1.14.2
pause_image=registry.k8s.io/pause:3.10.2

# Used instead of the self-built image wherever a container registry answers: the default of this kind release.
kindest_node=kindest/node:v1.37.0
python_slim=python:3.11-slim-bookworm
