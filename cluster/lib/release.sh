# shellcheck shell=bash
# The operator on the cluster, and the demonstration.

release=cost-aware-training
operator_namespace=cost-aware-training

install() {
  engine
  have_image cost-aware-operator:dev || fail "the images are missing; run: make images"
  namespace_manifest "${operator_namespace}" | kubectl apply --filename=- >/dev/null
  # The image's tag never changes, so what it was made from goes into the pods: a new image rolls them.
  local content
  content="$(docker image inspect --format "{{index .Config.Labels \"${content_label}\"}}" cost-aware-operator:dev)"
  # Somebody may have applied the CustomResourceDefinition before the chart did. Helm 4 applies on the server, where that is
  # a conflict of field owners; Helm 3 has no such flag and needs none.
  local force=()
  if helm upgrade --help | grep -q -- --force-conflicts; then force=(--force-conflicts); fi
  helm upgrade --install "${release}" "${repository}/charts/cost-aware-training-operator" --namespace "${operator_namespace}" \
    --values "${here}/values.yaml" --set-string "podAnnotations.costaware\\.dev/image-content=${content}" \
    --take-ownership "${force[@]}" --wait --timeout 3m >/dev/null
}

uninstall() {
  helm uninstall "${release}" --namespace "${operator_namespace}" --ignore-not-found --wait --timeout 2m
}

demo() {
  local namespace=catj-demo job=byte-gpt finished
  volumes "${namespace}"
  finished="$(kubectl --namespace "${namespace}" get costawaretrainingjob "${job}" --ignore-not-found \
    --output=jsonpath='{.status.conditions[?(@.status=="True")].type}')"
  if [[ " ${finished} " =~ \ (Succeeded|Failed)\  ]]; then
    say "deleting the finished run of ${job}"
    kubectl --namespace "${namespace}" delete costawaretrainingjob "${job}" --cascade=foreground >/dev/null
    rm -rf "${shared:?}/checkpoints/${namespace}"/*
  fi
  kubectl --namespace "${namespace}" apply --filename="${repository}/examples/${job}.yaml"
  "${repository}/.venv/bin/catj" watch "${job}" --namespace "${namespace}"
}
