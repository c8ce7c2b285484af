# A Kubernetes node for kind, where kindest/node cannot be pulled. `lib/node.sh` prepares the context.
FROM debian-minimal:bookworm
COPY node/ /
# kind calls crictl only to look images up, and ctr answers what it asks.
RUN mkdir -p /opt/cni/bin && cp /usr/lib/cni/* /opt/cni/bin/ && ln -s ctr /usr/local/bin/crictl \
 && systemctl enable containerd kubelet \
 && systemctl mask getty.target console-getty.service systemd-logind.service systemd-udevd.service apt-daily.timer apt-daily-upgrade.timer
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]
