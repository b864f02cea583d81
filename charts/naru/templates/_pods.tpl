{{/* What the pods of operator, router and Redis have in common. */}}

{{/*
Metadata of a pod template: root, component, values, annotations. What pods are found by wins over the user's labels.
The chart's version is no label here: a new chart with the same pods restarts nothing.
*/}}
{{- define "naru.podMetadata" -}}
{{- $own := include "naru.selectorLabels" . | fromYaml -}}
labels:
  {{- mergeOverwrite (dict) (deepCopy .root.Values.commonLabels) (deepCopy .values.podLabels) $own | toYaml | nindent 2 }}
{{- $annotations := mergeOverwrite (dict) (deepCopy .values.podAnnotations) (.annotations | default dict) }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where a pod goes, and what it is pulled and ended with: root, values, affinity, spread, grace. */}}
{{- define "naru.podSpec" -}}
automountServiceAccountToken: {{ .token | default false }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  {{- toYaml .values.podSecurityContext | nindent 2 }}
{{- with .values.imagePullSecrets | default .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity | default .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints | default .spread }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Image, resources, security and probes of a container: root, values, own. */}}
{{- define "naru.container" -}}
image: {{ include "naru.image" (dict "root" .root "image" .values.image "own" .own) }}
imagePullPolicy: {{ .values.image.pullPolicy }}
securityContext:
  {{- toYaml .values.securityContext | nindent 2 }}
{{- with .values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $name := list "startup" "liveness" "readiness" }}
{{- with get $.values.probes $name }}
{{ $name }}Probe:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Keeps pods of a component on different nodes or zones where that is possible: root, component, key. */}}
{{- define "naru.spread" -}}
- maxSkew: 1
  topologyKey: {{ .key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "naru.selectorLabels" . | nindent 6 }}
{{- end -}}

{{- define "naru.antiAffinity" -}}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: {{ .key }}
        labelSelector:
          matchLabels:
            {{- include "naru.selectorLabels" . | nindent 12 }}
{{- end -}}

{{/* A hook's or test's pod, without its command: root, image (a workload's values). */}}
{{- define "naru.hookPod" -}}
restartPolicy: Never
automountServiceAccountToken: {{ .token | default false }}
enableServiceLinks: false
securityContext:
  {{- toYaml .values.podSecurityContext | nindent 2 }}
{{- with .values.imagePullSecrets | default .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.hooks.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.hooks.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "naru.hookContainer" -}}
image: {{ include "naru.image" (dict "root" .root "image" .values.image "own" true) }}
imagePullPolicy: {{ .values.image.pullPolicy }}
securityContext:
  {{- toYaml .values.securityContext | nindent 2 }}
resources:
  {{- toYaml .root.Values.hooks.resources | nindent 2 }}
{{- end -}}
