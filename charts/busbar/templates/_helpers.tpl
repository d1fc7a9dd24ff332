{{/* Labels of every object; call with (list $ "component"). */}}
{{- define "busbar.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: busbar
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/part-of: busbar
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{/* Labels that select the pods of one component; they never change. */}}
{{- define "busbar.selector" -}}
app.kubernetes.io/name: busbar
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Full reference of an image; call with (list $ "busbar-platform"). */}}
{{- define "busbar.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ index . 1 }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- with get ($image.digests | default dict) (trimPrefix "busbar-" (index . 1)) }}@{{ . }}{{ end }}
{{- end }}

{{- define "busbar.workloadsImage" -}}
{{- .Values.workloads.image | default (include "busbar.image" (list . "busbar-workloads")) }}
{{- end }}

{{/* User name of one of our service accounts; call with (list $ "busbar-operator"). */}}
{{- define "busbar.subject" -}}
system:serviceaccount:{{ (index . 0).Release.Namespace }}:{{ index . 1 }}
{{- end }}

{{/* Security settings shared by all our pods. */}}
{{- define "busbar.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "busbar.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "busbar.placement" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.placement.tolerations }}
tolerations:
  {{- range . }}
  - {{ with .key }}key: {{ . | quote }}
    {{ end }}operator: {{ .operator | default "Equal" }}
    {{- with .value }}
    value: {{ . | quote }}
    {{- end }}
    {{- with .effect }}
    effect: {{ . }}
    {{- end }}
  {{- end }}
{{- end }}
{{- with .Values.placement.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Resources of one component; call with its resources. An empty amount is left out. */}}
{{- define "busbar.resources" -}}
{{- range $kind := list "requests" "limits" }}
{{- $amounts := index $ $kind }}
{{- if or $amounts.cpu $amounts.memory }}
{{ $kind }}:
  {{- with $amounts.cpu }}
  cpu: {{ . | quote }}
  {{- end }}
  {{- with $amounts.memory }}
  memory: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A projected token for calls to one of our processes; call with its name: operator, api or gateway. */}}
{{- define "busbar.tokenVolume" -}}
- name: token-{{ . }}
  projected:
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          audience: busbar-{{ . }}
          expirationSeconds: 3600
          path: token
{{- end }}

{{- define "busbar.tokenMount" -}}
- name: token-{{ . }}
  mountPath: /var/run/secrets/busbar/{{ . }}
  readOnly: true
{{- end }}

{{/* Volume of what must survive a restart; call with (list persistence "claim name" "volume name"). */}}
{{- define "busbar.stateVolume" -}}
{{- $persistence := index . 0 -}}
- name: {{ index . 2 }}
  {{- if $persistence.enabled }}
  persistentVolumeClaim:
    claimName: {{ $persistence.existingClaim | default (index . 1) }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}

{{/* A claim that an uninstall keeps; call with (list $ persistence "name" "component"). */}}
{{- define "busbar.claim" -}}
{{- $persistence := index . 1 -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ index . 2 }}
  namespace: {{ (index . 0).Release.Namespace }}
  labels:
    {{- include "busbar.labels" (list (index . 0) (index . 3)) | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
spec:
  accessModes: [ReadWriteOnce]
  {{- with $persistence.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ $persistence.size }}
{{- end }}

{{/* The API version of MutatingAdmissionPolicy, or nothing where it is not served. */}}
{{- define "busbar.mutatingPolicyVersion" -}}
{{- if or (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version) (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy") -}}
admissionregistration.k8s.io/v1
{{- else if .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy" -}}
admissionregistration.k8s.io/v1beta1
{{- end }}
{{- end }}

{{/* Head of a policy; call with (list $ "name"). */}}
{{- define "busbar.policyMetadata" -}}
name: {{ index . 1 }}
labels:
  {{- include "busbar.labels" (list (index . 0) "admission") | nindent 2 }}
{{- end }}

{{/* Binding of a validating policy to the namespaces of tenants, or to everything; (list $ "name" bool). */}}
{{- define "busbar.policyBinding" -}}
{{- if index . 2 -}}
{{ include "busbar.closedBindings" (list (index . 0) (index . 1) "v1" "Validating" (dict "validationActions" (list "Deny"))) }}
{{- else -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  {{- include "busbar.policyMetadata" . | nindent 2 }}
spec:
  policyName: {{ index . 1 }}
  validationActions: [Deny]
{{- end }}
{{- end }}

{{/*
Bindings of a policy to the namespaces of tenants and to those that a Tenant let go: two, because the terms of one
selector are all needed. Call with (list $ "name" "version" "Validating"|"Mutating" dict), the dict for their specs.
*/}}
{{- define "busbar.closedBindings" -}}
{{ include "busbar.bindingOf" (append . "") }}
        - {key: busbar.dev/tenant, operator: Exists}
---
{{ include "busbar.releasedBinding" . }}
{{- end }}

{{/* Binding of a policy to the namespaces that a Tenant let go; arguments as above. */}}
{{- define "busbar.releasedBinding" -}}
{{ include "busbar.bindingOf" (append . "-released") }}
        - {key: busbar.dev/released, operator: Exists}
        - {key: busbar.dev/tenant, operator: DoesNotExist}
{{- end }}

{{- define "busbar.bindingOf" -}}
apiVersion: admissionregistration.k8s.io/{{ index . 2 }}
kind: {{ index . 3 }}AdmissionPolicyBinding
metadata:
  {{- include "busbar.policyMetadata" (list (index . 0) (printf "%s%s" (index . 1) (index . 5))) | nindent 2 }}
spec:
  policyName: {{ index . 1 }}
  {{- with index . 4 }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  matchResources:
    namespaceSelector:
      matchExpressions:
{{- end }}

{{/* CEL: the caller is the operator. */}}
{{- define "busbar.isOperator" -}}
request.userInfo.username == '{{ include "busbar.subject" (list . "busbar-operator") }}'
{{- end }}

{{/*
Not empty: the operator puts the taint busbar.dev/power-not-ready on nodes. It gets the right to write nodes only together
with the policy that confines it to that taint.
*/}}
{{- define "busbar.taintsNodes" -}}
{{- if and .Values.power.agent.setLimits .Values.admission.enabled (or .Values.power.agent.enabled .Values.power.simulatedNodes) -}}
true
{{- end -}}
{{- end }}

{{/* CEL: the caller is in a group that administers the cluster. */}}
{{- define "busbar.isAdmin" -}}
request.userInfo.groups.exists(g, g in {{ include "busbar.celList" .Values.admission.adminGroups }})
{{- end }}

{{/* A list of strings in CEL. */}}
{{- define "busbar.celList" -}}
[{{ range $i, $text := . }}{{ if $i }}, {{ end }}'{{ $text | replace "\\" "\\\\" | replace "'" "\\'" }}'{{ end }}]
{{- end }}
