{{- define "catj.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{/* 53 characters leave room for the suffixes below. */}}
{{- define "catj.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- else if contains .Release.Name (include "catj.name" .) -}}
{{- include "catj.name" . -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "catj.name" .) | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "catj.selectorLabels" -}}
app.kubernetes.io/name: {{ include "catj.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "catj.labels" -}}
{{ include "catj.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: cost-aware-training
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end -}}

{{- define "catj.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "catj.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* ClusterRoles of two releases of the same name must not meet. */}}
{{- define "catj.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "catj.fullname" .) -}}
{{- end -}}

{{/* What running training jobs takes, in whichever namespaces they live. Tokens of jobs are made, never read and never written over:
a patch of a Secret would answer with all that is in it. */}}
{{- define "catj.jobRules" -}}
- apiGroups: [costaware.dev]
  resources: [costawaretrainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [costaware.dev]
  resources: [costawaretrainingjobs/status]
  verbs: [get, patch, update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
- apiGroups: [""]
  resources: [services]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, update]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end -}}
