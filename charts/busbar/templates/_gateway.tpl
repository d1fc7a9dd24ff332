{{/* Not empty: each gateway has a claim of its own. */}}
{{- define "busbar.gatewayClaims" -}}
{{- if and (gt (int .Values.gateway.replicas) 1) .Values.gateway.persistence.enabled -}}
true
{{- end -}}
{{- end }}

{{/* The template of a gateway's pod, of one as of several. */}}
{{- define "busbar.gatewayPod" -}}
metadata:
  labels:
    {{- include "busbar.labels" (list . "gateway") | nindent 4 }}
spec:
  serviceAccountName: busbar-gateway
  automountServiceAccountToken: true
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (int .Values.gateway.drainSeconds) 15 }}
  securityContext:
    {{- include "busbar.podSecurity" . | nindent 4 }}
  {{- include "busbar.placement" . | nindent 2 }}
  {{- if gt (int .Values.gateway.replicas) 1 }}
  # On nodes of their own where there are several: a node that is drained or dies takes one of them.
  affinity:
    podAntiAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "busbar.selector" (list . "gateway") | nindent 16 }}
  {{- end }}
  containers:
    - name: gateway
      image: {{ include "busbar.image" (list . "busbar-platform") }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [busbar-gateway]
      env:
        - name: HOME
          value: /tmp
        - name: BUSBAR_GATEWAY_OPERATOR_URL
          value: http://busbar-operator.{{ .Release.Namespace }}:8090
        - name: BUSBAR_GATEWAY_OPERATOR_TOKEN_FILE
          value: /var/run/secrets/busbar/operator/token
        - name: BUSBAR_GATEWAY_API_URL
          value: http://busbar-api.{{ .Release.Namespace }}:8081
        - name: BUSBAR_GATEWAY_API_TOKEN_FILE
          value: /var/run/secrets/busbar/api/token
        - name: BUSBAR_GATEWAY_OPERATOR_SUBJECT
          value: {{ include "busbar.subject" (list . "busbar-operator") }}
        {{- with .Values.gateway.metricsSubjects }}
        - name: BUSBAR_GATEWAY_METRICS_SUBJECTS
          value: {{ join "," . | quote }}
        {{- end }}
        - name: BUSBAR_LOG_FORMAT
          value: {{ .Values.logFormat }}
        - name: BUSBAR_GATEWAY_LOG_LEVEL
          value: {{ .Values.gateway.logLevel }}
        - name: BUSBAR_GATEWAY_HOLD_TIMEOUT_S
          value: {{ .Values.gateway.holdTimeoutSeconds | quote }}
        - name: BUSBAR_GATEWAY_DRAIN_S
          value: {{ .Values.gateway.drainSeconds | quote }}
        {{- if gt (int .Values.gateway.replicas) 1 }}
        - name: BUSBAR_GATEWAY_REPLICAS
          value: {{ .Values.gateway.replicas | quote }}
        {{- end }}
      ports:
        - name: http
          containerPort: 8080
        - name: internal
          containerPort: 8091
      livenessProbe:
        httpGet: {path: /health, port: http}
        initialDelaySeconds: 5
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 2
        timeoutSeconds: 2
      resources:
        {{- include "busbar.resources" .Values.gateway.resources | nindent 8 }}
      securityContext:
        {{- include "busbar.containerSecurity" . | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: state
          mountPath: /var/lib/busbar-gateway
        {{- include "busbar.tokenMount" "operator" | nindent 8 }}
        {{- include "busbar.tokenMount" "api" | nindent 8 }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: 64Mi
    {{- if eq (include "busbar.gatewayClaims" .) "" }}
    {{- include "busbar.stateVolume" (list .Values.gateway.persistence "busbar-gateway" "state") | nindent 4 }}
    {{- end }}
    {{- include "busbar.tokenVolume" "operator" | nindent 4 }}
    {{- include "busbar.tokenVolume" "api" | nindent 4 }}
{{- end }}
