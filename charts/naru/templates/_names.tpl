{{/* Names, labels, images and namespaces. A name longer than 44 is cut with a hash, so that every suffix fits. */}}

{{- define "naru.fullname" -}}
{{- $name := .Values.fullnameOverride | default .Release.Name -}}
{{- if gt (len $name) 44 -}}
{{- printf "%s-%s" (trunc 35 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/* Of cluster-wide objects: no two releases share it. A colon stands in no name of a namespace or release. */}}
{{- define "naru.clusterName" -}}
naru:{{ .Release.Namespace }}:{{ include "naru.fullname" . }}
{{- end -}}

{{- define "naru.chartLabel" -}}
{{- printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* What pods of a component are found by: root, component. */}}
{{- define "naru.selectorLabels" -}}
app.kubernetes.io/name: naru
app.kubernetes.io/instance: {{ .root.Release.Name | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "naru.ownLabels" -}}
helm.sh/chart: {{ include "naru.chartLabel" .root }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: naru
{{ include "naru.selectorLabels" . }}
{{- end -}}

{{/* Labels of an object: root, component, and maybe labels. Ours win: things are found by them. */}}
{{- define "naru.labels" -}}
{{- $own := include "naru.ownLabels" . | fromYaml -}}
{{- mergeOverwrite (dict) (deepCopy .root.Values.commonLabels) (deepCopy (.labels | default dict)) $own | toYaml -}}
{{- end -}}

{{/* Metadata of an object: root, component, suffix of its name, and maybe namespace, labels, annotations. */}}
{{- define "naru.metadata" -}}
name: {{ include "naru.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "naru.labels" . | nindent 2 }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Metadata of an object that lives only while a hook runs: root, suffix, events, weight, and maybe namespace. */}}
{{- define "naru.hookMetadata" -}}
{{- $annotations := dict "helm.sh/hook" .events "helm.sh/hook-weight" (toString .weight) "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded" -}}
{{- include "naru.metadata" (mergeOverwrite (dict) . (dict "component" "hook" "annotations" $annotations)) -}}
{{- end -}}

{{/* An image: root, image, and whether the registry of Naru's own images is put before it. */}}
{{- define "naru.image" -}}
{{- $own := and .own .root.Values.imageRegistry -}}
{{- if $own }}{{ trimSuffix "/" .root.Values.imageRegistry }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest -}}
@{{ .image.digest }}
{{- else -}}
:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* A value for an environment variable: whole numbers without an exponent. */}}
{{- define "naru.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{- define "naru.isClusterWide" -}}
{{- if has "*" .Values.watchNamespaces -}}
{{- if gt (len .Values.watchNamespaces) 1 -}}
{{- fail "watchNamespaces has \"*\" beside other names: \"*\" means all, leave the others out" -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{/* Watched namespaces that are known by name, as JSON. */}}
{{- define "naru.namespaces" -}}
{{- if or (include "naru.isClusterWide" .) (not .Values.watchNamespaces) -}}
{{- list .Release.Namespace | toJson -}}
{{- else -}}
{{- .Values.watchNamespaces | uniq | toJson -}}
{{- end -}}
{{- end -}}

{{/* Namespaces that hold a copy of the Redis Secret, the release's own first, as JSON. */}}
{{- define "naru.secretNamespaces" -}}
{{- concat (list .Release.Namespace) (include "naru.namespaces" . | fromJsonArray) | uniq | toJson -}}
{{- end -}}

{{/* Name of a component's service account: root, component. */}}
{{- define "naru.serviceAccountName" -}}
{{- $account := (get .root.Values .component).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if or (not $account.create) (and (eq .component "worker") (include "naru.isClusterWide" .root)) -}}
default
{{- else -}}
{{- include "naru.fullname" .root }}-{{ .component -}}
{{- end -}}
{{- end -}}
